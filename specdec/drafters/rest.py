"""rest: a tree of what followed the longest context of a corpus that agrees with the row's end.

Source: REST, "Retrieval-Based Speculative Decoding" (He et al. 2023), with the store of `suffix` (suffix_index.py) as
datastore. The occurrences of the longest context that agrees are looked up (at most `hits` of them), their
continuations of up to `n_max` tokens are put into a trie, and its `nodes` most frequent nodes are the draft. No q.

Cost of a round: one binary search a segment of the store, and a dictionary entry a token of the continuations. Memory:
8 bytes a token of the corpus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.config import as_list
from specdec.drafters.base import MOST_NODES, Draft, DraftContext, DraftRequest, ModelFree, as_array
from specdec.drafters.corpus import read_store, stamp
from specdec.drafters.options import state, whole
from specdec.drafters.suffix_index import SuffixIndex, SuffixStore
from specdec.errors import SpecdecError
from specdec.files.texts import as_path, expanded
from specdec.models.trees import tree_of


@dataclass
class Rest(ModelFree):
    """A tree from a datastore, the same for all rows. Raises SpecdecError for parameters out of range.

    corpus: a file, or a list of files (corpus.py)
    store: a `SuffixStore` in its place
    nodes: of a tree
    n_max: most levels of a tree
    depth: most context tokens that are compared
    min_match: least context tokens that must agree
    hits: most occurrences that are counted
    """

    corpus: Any = None
    store: SuffixStore | None = None
    nodes: int = whole(64, most=MOST_NODES)
    n_max: int = whole(10)
    depth: int = whole(16)
    min_match: int = whole(1)
    hits: int = whole(256)
    name: str = field(init=False, default="rest")
    makes_trees = True
    _index: SuffixIndex = state()

    def __post_init__(self) -> None:
        super().__post_init__()
        if (not as_list(self.corpus)) == (self.store is None):
            raise SpecdecError("rest needs a datastore: give corpus=FILE, or store=SuffixStore(...)")
        if self.store is not None and not isinstance(self.store, SuffixStore):
            raise SpecdecError(f"rest: store must be a SuffixStore, got {type(self.store).__name__}")

    def parameters(self) -> dict[str, Any]:
        return {**super().parameters(), "store": None if self.store is None else f"{self.store.size} tokens"}

    def fresh(self, context: DraftContext) -> Rest:
        made: Rest = super().fresh(context)
        store = self.store
        if store is None:
            files = [expanded(as_path(f, "rest: corpus")) for f in as_list(self.corpus)]
            store = read_store(tuple(map(stamp, files)), context.tokenizer, self.depth)
        if store.highest >= context.vocab_size:
            raise SpecdecError(
                f"rest: the corpus has the id {store.highest}, the target only {context.vocab_size} ids: "
                "give ids of the target's tokenizer"
            )
        made._index = store.index
        return made

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._tree(r) for r in requests]

    def _tree(self, request: DraftRequest) -> Draft:
        index, depth = self._index, self.depth
        text = np.append(as_array(request.tokens[max(0, len(request.tokens) - depth + 1) :]), request.last)
        query = text[::-1].astype(">u4").view(np.uint32)
        [positions] = index.nearest([(query, self.hits)])
        following = index.successors(positions, request.limit(self.n_max))  # [n, n_max]
        agreed = np.where(following[:, 0] >= 0, index.agreement(positions, query), 0)
        longest = int(agreed.max(initial=0))
        if longest < self.min_match:
            return Draft()
        tokens, parents = likeliest_tree(following[agreed == longest][: self.hits].tolist(), self.nodes)
        return Draft(tokens, parents, drafter=self.name)


def likeliest_tree(continuations: Sequence[Sequence[int]], nodes: int) -> tuple[list[int], list[int]]:
    """Return (tokens, parents) of the `nodes` most frequent prefixes, by level and the most frequent first.

    A continuation ends at an id below zero.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for continuation in continuations:
        end = next((i for i, token in enumerate(continuation) if token < 0), len(continuation))
        counts.update(tuple(continuation[:n]) for n in range(1, end + 1))
    # A prefix is at least as frequent as what continues it, so the chosen ones are a tree.
    return tree_of(sorted(sorted(counts, key=lambda prefix: (-counts[prefix], len(prefix)))[:nodes], key=len))
