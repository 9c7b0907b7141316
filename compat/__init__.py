"""What a device can do and where things run: errors, device facts, precision, execution device, offload, checkpoints."""
