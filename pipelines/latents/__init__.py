"""Latents between runs: core's LATENT, files, recovery, Musubi Tuner's caches."""
