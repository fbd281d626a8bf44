"""Models for experiments: SmolLM2, widened models, pairs made from distributions."""
