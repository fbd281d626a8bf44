"""Traces: every round of a run, as files, tables and pages."""
