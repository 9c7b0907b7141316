"""What the pack asks of the outside, and the ways in which the outside misbehaves."""
