"""Estimates from recorded texts, without decoding again."""
