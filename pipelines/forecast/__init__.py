"""What a run will need: memory, seconds, the cards that compute it; what an error of memory advises."""
