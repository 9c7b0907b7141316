"""The model families: checkpoint in, tensors out. Nothing here knows ComfyUI."""
