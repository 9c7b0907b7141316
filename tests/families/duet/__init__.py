"""A made-up family: two transformers that take turns, and latents of two tensors."""
