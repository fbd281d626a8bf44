"""prompt-lookup: propose what followed the last occurrence of the newest n-gram.

Source: prompt lookup decoding (Saxena 2023); transformers' `prompt_lookup_num_tokens`, vLLM's n-gram speculation.
Cost: one scan of the row's ids for the newest token per round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdec.drafters.base import DraftRequest, RowDrafter, as_array, suffix_matches
from specdec.drafters.options import whole
from specdec.errors import SpecdecError


@dataclass
class PromptLookup(RowDrafter):
    """Proposes what followed the longest match; stateless. Raises SpecdecError for parameters out of range.

    n_max: most tokens to propose
    ngram_max, ngram_min: tokens to match, the longest match first
    match: the "latest" or the "earliest" occurrence
    """

    n_max: int = whole(4)
    ngram_max: int = whole(3)
    ngram_min: int = whole(1)
    match: str = "latest"
    name: str = field(init=False, default="prompt-lookup")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ngram_min > self.ngram_max:
            raise SpecdecError(
                f"prompt-lookup needs ngram_min <= ngram_max, got ngram_min={self.ngram_min}, "
                f"ngram_max={self.ngram_max}"
            )
        if self.match not in ("latest", "earliest"):
            raise SpecdecError(f"prompt-lookup: match must be 'latest' or 'earliest', got {self.match!r}")

    def _propose(self, request: DraftRequest) -> list[int]:
        tokens = as_array(request.tokens)
        pattern = np.append(tokens[max(0, len(tokens) - self.ngram_max + 1) :], request.last)
        ends, n = suffix_matches(tokens, pattern[-self.ngram_max :])
        if n < self.ngram_min:
            return []
        end = int(ends[-1] if self.match == "latest" else ends[0])
        limit = request.limit(self.n_max)
        following = tokens[end : end + limit].tolist()
        if len(following) < limit:  # the match reaches the newest token, which `tokens` does not hold
            following.append(int(request.last))
        return following
