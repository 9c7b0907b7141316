"""What a device can do and where things run: device facts, precision, kernels, execution, offload, checkpoints."""
