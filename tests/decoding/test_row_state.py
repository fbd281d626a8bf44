"""A row's sampled text is its own: it does not depend on the batch, the order, the neighbours or who had its slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec import NgramCache, NgramMapK, NgramMapK4V, NgramMod, Rest, SpeculativeDecoder, Suffix, SuffixStore
from specdec.drafters import STRATEGIES
from tests.helpers.playing import check_counts, quoting_ids, random_ids
from tests.helpers.tiny import tiny_model

LOOP, ONCE = random_ids(9, 7), random_ids(40, 5)
ROWS = [LOOP * 4, [LOOP[0]] * 20, LOOP[::-1] * 3, LOOP * 3, ONCE, ONCE[:24]]  # only row 4 tells what row 5's text was
SEEDS = [100 + i for i in range(len(ROWS))]
# Small enough to draft often from these rows; a chain ends in the draft model, whose drafts claim a q: what the
# strategy before it proposes decides which draws the target makes.
SMALL: dict[str, Any] = {
    "ngram-simple": "ngram-simple:size_n=2:size_m=4",
    "ngram-map-k": NgramMapK(2, 4),
    "ngram-map-k4v": NgramMapK4V(2, 4, parity=False),
    "ngram-mod": NgramMod(16, 1, 6),
    "ngram-cache": "ngram-cache",
    "prompt-lookup": "prompt-lookup",
    "suffix": Suffix(4),
    "recycling": "recycling:nodes=8",
    "lookahead": "lookahead:window=3:ngram=3:guesses=2",
    "rest": Rest(store=SuffixStore([random_ids(9, 7) * 3, random_ids(40, 5)]), nodes=8),
    "early-exit": "early-exit:layers=1:n_max=3",
    "draft-model": "draft-model:n_max=4",
}
CHAINS = {name: [part] if name == "draft-model" else [part, SMALL["draft-model"]] for name, part in SMALL.items()}
CHAINS |= {
    "defaults": ["ngram-cache", "draft-model"],
    "three": [SMALL["suffix"], SMALL["ngram-map-k"], SMALL["draft-model"]],
    "tree": ["prompt-lookup", "draft-model:tree=2x2"],
    "automatic": None,
    "p_min": [SMALL["ngram-mod"], "draft-model:n_max=4:p_min=0.2"],
}


def pair() -> SpeculativeDecoder:
    target = tiny_model("llama", num_hidden_layers=2)
    with torch.no_grad():
        for p in target.parameters():
            if p.ndim == 2:
                p.mul_(6)
    return SpeculativeDecoder(target, target, check=False)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return pair()


def test_every_registered_strategy_is_swept() -> None:
    """But for those that need a head: test_eagle3_strategy.py, test_dflash.py and test_mtp.py in tests/drafters."""
    assert set(SMALL) == set(STRATEGIES) - {"eagle3", "dflash", "mtp"}


def generate(decoder: SpeculativeDecoder, order: Sequence[int], strategies: Any, **options: Any) -> Any:
    rows, seeds = [ROWS[i] for i in order], [SEEDS[i] for i in order]
    out = decoder.generate(rows, seed=seeds, strategies=strategies, temperature=0.9, max_new_tokens=12, **options)
    check_counts(out)
    return dict(zip(order, out.token_ids, strict=True))


@pytest.mark.fast(5)
@pytest.mark.parametrize("name", CHAINS)
def test_a_row_is_what_it_is_alone(decoder: SpeculativeDecoder, name: str) -> None:
    chain, options = CHAINS[name], {"draft_length": "auto"} if name == "three" else {}
    alone = {}
    for i in range(len(ROWS)):
        alone |= generate(decoder, [i], chain, **options)
    for batch, order in ((1, [0, 1, 2, 3, 4, 5]), (2, [4, 2, 5, 0, 3, 1]), (5, [3, 1, 4, 0, 5, 2])):
        assert generate(decoder, order, chain, batch_size=batch, **options) == alone, (batch, order)


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_rules_whose_text_is_plain_decodings_are_independent_too(decoder: SpeculativeDecoder, rule: str) -> None:
    plain = generate(decoder, range(len(ROWS)), [])
    chain = [SMALL["ngram-cache"], SMALL["ngram-mod"], SMALL["draft-model"]]
    for batch, order in ((1, [1, 0, 3, 2, 4, 5]), (2, [4, 3, 5, 2, 1, 0])):
        assert generate(decoder, order, chain, batch_size=batch, acceptance=rule) == plain


def test_kept_state_changes_no_row(decoder: SpeculativeDecoder) -> None:
    chain = [SMALL["ngram-cache"], SMALL["ngram-map-k"], SMALL["ngram-mod"], SMALL["draft-model"]]
    alone = generate(pair(), [5], chain)
    kept = pair()
    for order in ([0, 2], [4], [5]):
        last = generate(kept, order, chain, keep_state=True)
    assert last == alone


@pytest.mark.fast(2)
@pytest.mark.parametrize("kind", [NgramMapK, NgramMapK4V, NgramMod, NgramCache])
def test_upstreams_reuse_of_a_slot_is_asked_for_and_said(decoder: SpeculativeDecoder, kind: Any) -> None:
    sizes = {NgramMod: {"n_match": 16, "n_min": 1, "n_max": 6}, NgramCache: {}}.get(kind, {"size_n": 2, "size_m": 4})
    rows = [quoting_ids(60, 5)] * 2 if kind in (NgramMapK, NgramMapK4V) else [ONCE, ONCE[:24]]
    found = {}
    for shared in (False, True):
        strategy = kind(**sizes, shared=shared)
        out = decoder.generate(rows, 8, strategies=[strategy], batch_size=1)
        assert out.provenance["shared_state"] == ([strategy.name] if shared else [])
        assert out.provenance["strategies"][0]["shared"] is shared
        found[shared] = out.stats.rows
    alone = decoder.generate(rows[1:], 8, strategies=[kind(**sizes)]).stats.rows[0]
    assert found[False][1] == alone != found[True][1]
