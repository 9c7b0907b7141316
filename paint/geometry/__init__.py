"""Meshes, cameras, and what each camera sees."""
