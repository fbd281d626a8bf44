"""ngram-simple: llama.cpp's scan for the nearest earlier occurrence of the last n tokens.

Source: llama.cpp `ngram-simple`, draft for draft. Upstream's oddities are kept: n is also the least draft length, a
context of at most n + m + 1 tokens never drafts, a match at position 0 or at the very end is not found, and only the
nearest match is tried. Cost: one scan of the row's ids for the newest token per round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdec.drafters.base import DraftRequest, RowDrafter, as_array, suffix_matches
from specdec.drafters.ngram.parity import MOST
from specdec.drafters.options import whole


@dataclass
class NgramSimple(RowDrafter):
    """Proposes what followed the nearest match; stateless.

    size_n: tokens to match
    size_m: most tokens to propose
    min_hits: upstream's, without effect there or here
    Raises SpecdecError for parameters out of range.
    """

    size_n: int = whole(12, most=MOST)
    size_m: int = whole(48, most=MOST)
    min_hits: int = whole(1)
    name: str = field(init=False, default="ngram-simple")

    def _propose(self, request: DraftRequest) -> list[int]:
        tokens, n, m = as_array(request.tokens), self.size_n, self.size_m
        length = len(tokens)
        if length <= n + m + 1:
            return []
        pattern = np.append(tokens[length - n + 1 :], request.last)
        # Position 0 and the last token are outside the searched text; indices below are of tokens[1 : length - 1].
        ends, matched = suffix_matches(tokens[1 : length - 1], pattern)
        if matched < n:
            return []
        end = int(ends[-1]) + 1
        count = min(m, length - end)
        if count < n:
            return []
        return tokens[end : end + count].tolist()
