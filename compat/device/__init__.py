"""Device identity and capabilities: facts, probes, known bugs, the report."""
