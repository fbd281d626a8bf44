"""rest: a tree of what followed the longest context of a corpus that agrees with the row's end.

Source: REST, "Retrieval-Based Speculative Decoding" (He et al. 2023), with the store of `suffix` (suffix_index.py) as
datastore. The occurrences of the longest context that agrees are looked up (at most `hits` of them), their
continuations of up to `n_max` tokens are put into a trie, and its `nodes` most frequent nodes are the draft. No q.

A corpus is a file, or a list of files: text (a document a file), `.npy` (token ids), or `.json` and `.jsonl` with
texts, lists of ids, or records as prompt sets have them. Texts are tokenised once for every file and tokenizer of a
process.

Cost of a round: one binary search a segment of the store, and a dictionary entry a token of the continuations. Memory:
8 bytes a token of the corpus.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specdec.config import as_list, check_whole
from specdec.drafters.base import Draft, DraftContext, Drafter, DraftRequest, as_array
from specdec.drafters.suffix_index import SuffixIndex, SuffixStore
from specdec.errors import SpecdecError
from specdec.files.texts import as_path, expanded, parse_json, parse_json_lines, read_text, reading

LINES, DOCUMENT, IDS = (".jsonl", ".ndjson"), ".json", ".npy"
FIELDS = ("text", "prompt", "turns", "messages", "conversations", "content", "value", "answer", "output", "token_ids")


@dataclass
class Rest(Drafter):
    """A tree from a datastore, the same for all rows. Raises SpecdecError for parameters out of range.

    corpus: a file, or a list of files
    store: a `SuffixStore` in its place
    nodes: of a tree
    n_max: most levels of a tree
    depth: most context tokens that are compared
    min_match: least context tokens that must agree
    hits: most occurrences that are counted
    """

    corpus: Any = None
    store: SuffixStore | None = None
    nodes: int = 64
    n_max: int = 10
    depth: int = 16
    min_match: int = 1
    hits: int = 256
    name: str = field(init=False, default="rest")
    _index: SuffixIndex = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("nodes", "n_max", "depth", "min_match", "hits"):
            check_whole(f"rest: {name}", getattr(self, name), 1)
        if self.nodes > 511:
            raise SpecdecError(f"rest: nodes={self.nodes} is above the limit of 511")
        if (self.corpus is None) == (self.store is None):
            raise SpecdecError("rest needs a datastore: give corpus=FILE, or store=SuffixStore(...)")
        if self.store is not None and not isinstance(self.store, SuffixStore):
            raise SpecdecError(f"rest: store must be a SuffixStore, got {type(self.store).__name__}")

    @property
    def runs_a_model(self) -> bool:
        return False

    @property
    def makes_trees(self) -> bool:
        return True

    @property
    def tree_nodes(self) -> int:
        return self.nodes

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
        positions = index.candidates(query, self.hits)
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
    chosen = sorted(counts, key=lambda prefix: (-counts[prefix], len(prefix)))[:nodes]
    chosen.sort(key=len)
    place = {prefix: node for node, prefix in enumerate(chosen)}
    return [prefix[-1] for prefix in chosen], [place.get(prefix[:-1], -1) for prefix in chosen]


Stamp = tuple[str, int, int]  # path, time and size: another file is read anew


def stamp(path: Path) -> Stamp:
    """Name a file and its state. Raises SpecdecError if it is not there."""
    with reading(path, "rest: corpus") as found:
        state = os.stat(found)
        return str(found), state.st_mtime_ns, state.st_size


@lru_cache(maxsize=4)
def read_store(files: tuple[Stamp, ...], tokenizer: Any, depth: int) -> SuffixStore:
    """Read and index a corpus. Raises SpecdecError for texts without a tokenizer and files that are no corpus."""
    store = SuffixStore(depth=depth)
    for path, _, _ in files:
        for document in documents(Path(path)):
            if isinstance(document, str):
                if tokenizer is None:
                    raise SpecdecError(f"rest: {path} holds text, and the decoder has no tokenizer: give token ids")
                document = tokenizer(document, add_special_tokens=False)["input_ids"]
            store.add(document)
    store.freeze()
    return store


def documents(path: Path) -> Iterator[str | list[int] | np.ndarray]:
    """Yield the documents of a file: texts or ids. Raises SpecdecError."""
    what, kind = "rest: corpus", path.suffix.lower()
    if kind == IDS:
        try:
            with reading(path, what) as found:
                ids = np.load(found, allow_pickle=False)
        except (ValueError, EOFError):
            raise SpecdecError(f"{what} {path} is no array of numpy's") from None
        if ids.dtype.kind not in "iu" or (ids.size and ids.min() < 0):
            raise SpecdecError(f"{what} {path} holds no token ids: expected whole numbers from 0 on")
        yield from np.atleast_2d(ids)
    elif kind in LINES:
        for number, record in parse_json_lines(read_text(path, what), str(path)):
            yield from _parts(record, f"{path}, line {number}")
    elif kind == DOCUMENT:
        yield from _parts(parse_json(read_text(path, what), str(path)), str(path))
    else:
        yield read_text(path, what)


def _parts(record: Any, where: str) -> Iterator[str | list[int]]:
    """Yield the texts and lists of ids in a JSON record."""
    if isinstance(record, str):
        yield record
    elif isinstance(record, Mapping):
        for name in FIELDS:
            if record.get(name) is not None:
                yield from _parts(record[name], where)
    elif isinstance(record, list) and record and all(type(t) is int and t >= 0 for t in record):
        yield record
    elif isinstance(record, list):
        for part in record:
            yield from _parts(part, where)
    else:
        raise SpecdecError(f"{where}: expected texts, lists of token ids, or records with {', '.join(FIELDS[:4])}")
