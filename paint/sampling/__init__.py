"""Solvers, and the loops that paint and delight."""
