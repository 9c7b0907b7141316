"""Tests of paint/."""
