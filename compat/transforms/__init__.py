"""Changes to modules between reading and moving them: attention, Conv3d, fp16, fused blocks, compile, step cache."""
