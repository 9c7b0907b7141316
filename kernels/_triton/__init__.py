"""Triton launches; the only files that import triton."""
