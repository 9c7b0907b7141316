"""Simulated accelerators: torch devices that tests can use on a machine without a GPU."""
