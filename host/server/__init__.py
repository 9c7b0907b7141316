"""The HTTP side of the AnyGPU tab."""
