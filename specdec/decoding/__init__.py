"""The loop: draft, verify, accept, trim; rows, results and what they were made with."""

from specdec.decoding import block_verification as block_verification  # registers its rule
from specdec.decoding import lossy_rules as lossy_rules
from specdec.decoding import multi_draft as multi_draft
