"""Device capabilities and placement: device facts, precision, kernels, execution, offload, checkpoints."""
