"""The loop: draft, verify, accept, trim; rows, results and what they were made with."""
