"""Texturing a mesh: multiview networks, orthographic views, back-projection and filling in plain torch."""
