"""Many renders on many devices and machines, on Ray: what the nodes and `anygpu` do not need.

Its own extra (``pip install "anygpu[farm]"``) and command (``anygpu-farm``); the registry's archive leaves it out.
"""
