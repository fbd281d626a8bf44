"""A Hugging Face model over a ragged cache: loading, attention, passes, compilation."""
