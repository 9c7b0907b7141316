"""What a device is and can do: facts, probes, known bugs, the report."""
