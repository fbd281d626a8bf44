"""Training of drafters: EAGLE-3 heads and draft models, on what their target itself would write (docs/training.md)."""
