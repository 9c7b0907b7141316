"""Where weights are: the offloader, its hooks, weights in host memory, statistics."""
