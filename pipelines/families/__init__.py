"""One folder per model family."""
