"""The loop: draft, verify, accept, trim, and what becomes of a row."""
