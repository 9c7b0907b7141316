"""Families that only the tests have: one folder each, added by ``registry.register``."""
