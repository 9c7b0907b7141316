"""Many renders on many devices and machines, on Ray; its own extra and command, and not in the registry's archive."""
