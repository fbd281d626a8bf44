"""How well lookup caches would draft a text, with no model: llama.cpp's `lookup-stats`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec.config import check_whole
from specdec.drafters.ngram.cache import propose
from specdec.drafters.ngram.lookup_cache import LookupCache
from specdec.errors import SpecdecError
from specdec.models.kv_cache import common_prefix
from specdec.stats import RoundRecord, Tally


def chunk_count(total: int, n_ctx: int) -> int:
    """How many chunks of a text `lookup_stats` walks: upstream skips the last one, whole or not."""
    return max(0, (total - 1) // n_ctx)


def lookup_stats(
    ids: Sequence[int],
    n_ctx: int = 4096,
    n_draft: int = 3,
    static: LookupCache | None = None,
    dynamic: LookupCache | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
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
    grown, records, seconds = LookupCache(), [], 0.0
    if dynamic is not None:
        grown.merge(dynamic)
    for i in range(chunks):
        context = LookupCache()
        truth, text = np.asarray(ids[i * n_ctx : (i + 1) * n_ctx]), [int(ids[i * n_ctx])]
        while len(text) < len(truth):
            started, size = time.perf_counter(), len(text)
            draft = propose(text, n_draft, context, grown, static)
            seconds += time.perf_counter() - started
            accepted = common_prefix(np.array(draft, dtype=np.int64), truth[size : size + n_draft + 1])
            records.append(RoundRecord("ngram-cache", len(draft), accepted))
            for token in truth[size : size + accepted + 1]:
                text.append(int(token))
                context.update(text, 1)
        grown.merge(context)
        advance()
    t = Tally.of(records)
    counts = {name: getattr(t, name) for name in ("rounds", "drafted_rounds", "draft_tokens", "accepted_tokens")}
    return {
        "tokens": len(ids),
        "chunks": chunks,
        "n_ctx": n_ctx,
        "n_draft": n_draft,
        **counts,
        "draft_acceptance_rate": t.draft_acceptance_rate,
        "tokens_per_round": chunks * (n_ctx - 1) / t.rounds,
        "draft_seconds": seconds,
    }
