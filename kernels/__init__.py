"""Fused operations: each with its reference, its registration and its launch."""
