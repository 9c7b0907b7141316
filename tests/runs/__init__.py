"""Long runs with a seed: memory that runs out, cancels and kills at random moments. Each can be repeated."""
