"""Files with weights or latents: safetensors, GGUF, scaled and packed weights."""
