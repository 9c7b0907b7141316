"""Placement of weights: the offloader, its hooks, weights in host memory, statistics."""
