"""The device layer for core's own MODEL, VAE and CLIP."""
