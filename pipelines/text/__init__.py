"""Text encoders and encoded prompts."""
