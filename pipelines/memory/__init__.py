"""What a run needs and how it is made to fit."""
