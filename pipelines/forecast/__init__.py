"""Forecast of a run: memory, seconds, the cards that compute it, and advice when memory runs out."""
