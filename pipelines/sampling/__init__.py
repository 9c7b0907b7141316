"""The denoising loop: schedules, guidance, calls by core's samplers."""
