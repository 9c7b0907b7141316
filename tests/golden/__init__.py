"""Results recorded bit for bit, and what compares them: see record.py."""
