"""Painted views back onto the texture."""
