"""Mochi 1."""
