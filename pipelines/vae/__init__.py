"""Encoding and decoding: whole, in tiles, in chunks, layer by layer."""
