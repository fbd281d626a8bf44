"""How well lookup caches would draft a text, with no model: llama.cpp's `lookup-stats`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from specdec.config import check_whole
from specdec.drafters.ngram.cache import propose
from specdec.drafters.ngram.lookup_cache import LookupCache
from specdec.errors import SpecdecError


def chunk_count(total: int, n_ctx: int) -> int:
    """How many chunks of a text `lookup_stats` walks: upstream skips the last one, whole or not."""
    return max(0, (total - 1) // n_ctx)


def lookup_stats(
    ids: Sequence[int], n_ctx: int = 4096, n_draft: int = 3, static: LookupCache | None = None,
    dynamic: LookupCache | None = None, advance: Callable[[], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Walk a text in chunks of `n_ctx` ids as if a target wrote it, and count which drafted ids it would accept.

    Every chunk starts with an empty context cache, which is added to the dynamic one at its end (a copy: what is given
    stays as it is). Returns upstream's counts under specdec's names; `draft_seconds` is the time spent drafting.
    Raises SpecdecError for a text of no more than `n_ctx` ids, of which nothing would be walked.
    """
    for name, value, least in (("n_ctx", n_ctx, 2), ("n_draft", n_draft, 1)):
        check_whole(f"lookup stats: {name}", value, least)
    chunks = chunk_count(len(ids), n_ctx)
    if chunks == 0:
        raise SpecdecError(f"lookup stats: {len(ids)} tokens are no more than one chunk of {n_ctx}, which is skipped")
    grown = LookupCache()
    if dynamic is not None:
        grown.merge(dynamic)
    counts = dict.fromkeys(("rounds", "drafted_rounds", "draft_tokens", "accepted_tokens"), 0)
    seconds = 0.0
    for i in range(chunks):
        context = LookupCache()
        seconds += _walk(ids[i * n_ctx : (i + 1) * n_ctx], n_draft, context, grown, static, counts)
        grown.merge(context)
        if advance is not None:
            advance()
    drafted, accepted, rounds = counts["draft_tokens"], counts["accepted_tokens"], counts["rounds"]
    return {
        "tokens": len(ids), "chunks": chunks, "n_ctx": n_ctx, "n_draft": n_draft, **counts,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_round": chunks * (n_ctx - 1) / rounds, "draft_seconds": seconds,
    }  # fmt: skip


def _walk(
    truth: Sequence[int], n_draft: int, context: LookupCache, dynamic: LookupCache, static: LookupCache | None,
    counts: dict[str, int],
) -> float:  # fmt: skip
    """One chunk; adds to `counts` and returns the seconds spent drafting."""
    text, seconds = [int(truth[0])], 0.0
    while len(text) < len(truth):
        started = time.perf_counter()
        draft = propose(text, n_draft, context, dynamic, static)
        seconds += time.perf_counter() - started
        size = len(text)
        rest = truth[size : size + n_draft + 1]
        accepted = next((k for k, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), len(draft))
        accepted = min(accepted, len(rest))
        for token in rest[: accepted + 1]:
            text.append(int(token))
            context.update(text, 1)
        counts["rounds"] += 1
        counts["drafted_rounds"] += bool(draft)
        counts["draft_tokens"] += len(draft)
        counts["accepted_tokens"] += accepted
    return seconds
