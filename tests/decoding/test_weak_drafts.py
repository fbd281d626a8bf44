"""A draft that contributes nothing is named: one warning a call, and the same text in its provenance."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specdec import Draft, EarlyExit, SpeculativeDecoder
from specdec.drafters import Eagle3
from specdec.drafters.base import RowDrafter
from specdec.drafters.dflash.strategy import DFlash
from specdec.stats import Counters, DraftWarning, RoundRecord, Stats
from tests.drafters.test_dflash import head_config, saved
from tests.helpers.eagle3 import random_head
from tests.helpers.playing import Scripted, random_ids, rest_of, right_until
from tests.helpers.tiny import tiny_model

V, N = 512, 30  # with four rows 120 rounds
PROMPTS = [random_ids(9, i, V) for i in range(4)]
PAIR = "Look at the pair"


@cache
def decoder(unrelated: bool = True) -> SpeculativeDecoder:
    target, other = (tiny_model("llama", vocab=V, seed=seed, num_hidden_layers=1) for seed in (0, 9))
    return SpeculativeDecoder(target, other if unrelated else target, check=False)


@cache
def texts() -> list[list[int]]:
    plain = decoder().generate(PROMPTS, 60, strategies=[]).token_ids
    return [p + t for p, t in zip(PROMPTS, plain, strict=True)]


def said(strategies: Any, prompts: Any = PROMPTS, n: int = N, **options: Any) -> list[str]:
    """What a call warns of."""
    pair = options.pop("pair", None) or decoder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = pair.generate(prompts, n, strategies=strategies, **options)
    found = [str(w.message) for w in caught if issubclass(w.category, DraftWarning)]
    assert len(found) <= 1
    assert " ".join(out.provenance["warnings"]) == "".join(found)
    return out.provenance["warnings"]


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("strategies", "options"),
    [
        (["draft-model:n_max=2"], {}),
        (["draft-model:n_max=2"], {"temperature": 0.3}),
        (["draft-model:n_max=2"], {"temperature": 0.3, "acceptance": "coupled"}),
        (["draft-model:tree=2x1"], {}),
        (None, {}),  # automatic length, which soon drafts no more
        (None, {"prompts": PROMPTS[0], "n": 110}),
    ],
)
def test_an_unrelated_draft_model_is_named(strategies: Any, options: dict[str, Any]) -> None:
    [text] = said(strategies, **options)
    assert text.startswith("strategy 'draft-model' contributes nothing: ")
    assert PAIR in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("strategy", "options", "cause"),
    [
        ("early-exit", {"layers": 1, "n_max": 2}, "train an adapter"),
        ("eagle3", {"n_max": 2}, "layer_ids has two conventions"),
        ("eagle3", {"nodes": 6, "top_k": 3, "depth": 1}, "layer_ids has two conventions"),
        ("eagle3", {"nodes": "auto", "top_k": 3, "depth": 1}, "layer_ids has two conventions"),
        ("dflash", {"n_max": 2}, "mask_token_id"),
    ],
    ids=str,
)
def test_every_strategy_that_runs_a_model_names_its_own_causes(
    strategy: str, options: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    target = tiny_model("llama", vocab=V, seed=0, num_hidden_layers=12, initializer_range=0.5)
    drafter: Any
    if strategy == "early-exit":
        drafter = EarlyExit(**options)
    elif strategy == "eagle3":
        head = random_head(vocab_size=V, draft_vocab_size=V, hidden_size=32, target_hidden_size=32, head_dim=8)
        drafter = Eagle3(head=head, **options)
    else:
        drafter = DFlash(saved(tmp_path, head_config(target, [1])), **options)
    [text] = said([drafter], pair=SpeculativeDecoder(target, check=False), n=60)
    assert text.startswith(f"strategy '{strategy}' contributes nothing: ")
    assert cause in text
    assert PAIR not in text


def wrong(ids: list[int]) -> list[int]:
    return [(t + 1) % V for t in rest_of(texts(), ids)[:3]]


def test_every_strategy_that_contributes_nothing_is_named_in_one_warning() -> None:
    class Odd(Scripted):
        """Drafts in every other round, so that the model drafts in the others."""

        def draft(self, requests: Any) -> list[Draft]:
            return [d if r.position % 2 else Draft() for r, d in zip(requests, super().draft(requests), strict=True)]

    found = said([Odd(wrong), "draft-model:n_max=1"], n=60)
    assert [text.split("'")[1] for text in found] == ["scripted", "draft-model"]


def test_a_lookup_that_finds_the_wrong_thing_is_told_to_be_left_out() -> None:
    class Lookup(RowDrafter):
        def _propose(self, request: Any) -> list[int]:
            return wrong([*map(int, request.tokens), int(request.last)])

    lookup = Lookup()
    lookup.name = "lookup"
    [text] = said([lookup])
    assert "leave the strategy out" in text
    assert PAIR not in text


@pytest.mark.fast(3)
@pytest.mark.parametrize("length", ["short", "right", "half", "nothing drafted", "plain"])
def test_silence_where_there_is_nothing_to_say(length: str) -> None:
    if length == "short":
        assert said(["draft-model:n_max=2"], n=24) == []
    elif length == "right":
        assert said(["draft-model:n_max=2"], pair=decoder(False)) == []
    elif length == "half":
        assert said([Scripted(right_until(texts(), 3, wrong_at=1))]) == []
    elif length == "nothing drafted":
        assert said(["ngram-mod"]) == []
    else:
        assert said([]) == []


def test_streams_and_single_rounds_warn_as_well() -> None:
    with pytest.warns(DraftWarning, match="'draft-model' contributes nothing"):
        list(decoder().rounds(PROMPTS[0], 110, strategies=["draft-model:n_max=1"]))


def tallied(rounds: int, accepted: int, skipped: int) -> Stats:
    records = [RoundRecord("a", 2, int(i < accepted)) for i in range(rounds)]
    return Stats(rows=[records], emitted=[rounds + accepted], counters={"a": Counters(n_skipped=skipped)})


@pytest.mark.parametrize(
    ("rounds", "accepted", "skipped", "named"),
    [
        (100, 4, 0, True), (100, 5, 0, False), (99, 0, 0, False), (400, 6, 0, True), (400, 20, 0, False),
        (9, 1, 91, True), (9, 2, 91, False), (5, 0, 200, False), (6, 0, 94, True), (6, 0, 93, False),
        (0, 0, 500, False),
    ],
)  # fmt: skip
def test_the_rule(rounds: int, accepted: int, skipped: int, named: bool) -> None:
    assert list(tallied(rounds, accepted, skipped).hardly_accepted()) == ["a"] * named
