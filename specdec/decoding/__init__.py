"""The loop: draft, verify, accept, trim; rows, results and what they were made with."""

from specdec.decoding import lossy_rules as lossy_rules  # registers them
