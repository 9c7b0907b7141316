"""Scenes that run inside ComfyUI's own process, on the simulated accelerator; the tests call them by name."""
