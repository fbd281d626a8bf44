"""Losslessness of the whole pipeline: cuts, penalties and constraints against enumerated laws, written from their
definitions in float64 (tests/helpers/laws.py); and what breaks it, which the same test rejects. Top-k, top-p and min-p
alone are in test_lossless.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from specdec import SpeculativeDecoder
from specdec.decoding import verification, verify_pass
from specdec.decoding.result import Generation
from specdec.drafters import DraftModel, PromptLookup
from specdec.drafters.base import Draft, DraftRequest
from specdec.sampling.prefixes import Prefixes
from tests.helpers.broken import SampledDrafter
from tests.helpers.dfa import DFA, Table, accepts
from tests.helpers.laws import Adjust, Fit, cell, fit, samples, small_model, three_token_law, three_tokens

V = 13
PROMPT = [5, 7, 5, 7, 5]
SAMPLES = samples(3_000, 2_000)
CONTROL_SAMPLES, T = 2_500, 0.8
MODEL, LOOKUP = (DraftModel(n_max=2),), (PromptLookup(n_max=2),)
BOTH = (*LOOKUP, *MODEL)
TABLE: Table = {s: {t: t % 3 for t in range(V) if t % 3 != s} for s in range(3)}


def penalties(logits: np.ndarray, texts: np.ndarray, prompt: int, presence: float, frequency: float) -> np.ndarray:
    counts = np.stack([np.bincount(text[prompt:], minlength=V) for text in texts])
    return logits - frequency * counts - presence * (counts > 0)


def no_repeated_pair(logits: np.ndarray, texts: np.ndarray, prompt: int) -> np.ndarray:
    out = logits.copy()
    for row, text in zip(out, texts.tolist(), strict=True):
        row[[b for a, b in pairwise(text) if a == text[-1]]] = -np.inf
    return out


def constrained(logits: np.ndarray, texts: np.ndarray, prompt: int) -> np.ndarray:
    out = logits.copy()
    for row, text in zip(out, texts[:, prompt:].tolist(), strict=True):
        if accepts(TABLE, text):  # other texts have probability 0 already
            row[[t for t in range(V) if not accepts(TABLE, [*text, t])]] = -np.inf
    return out


@dataclass(frozen=True)
class Case:
    """acceptance, strategies, options of generate; and the law's own form of them."""

    acceptance: str
    strategies: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    adjust: Adjust | None = None

    @property
    def law(self) -> np.ndarray:
        enumerated = ("top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
        cuts = {name: value for name, value in self.options.items() if name in enumerated}
        return three_token_law(small_model(3, V), PROMPT, T, adjust=self.adjust, **cuts)


PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.9}
DEFINED = partial(penalties, presence=1.5, frequency=0.9)
DFA_OPTIONS = {"logits_processor": [DFA(TABLE)]}
CASES = {
    "leviathan, typical_p": Case("leviathan", MODEL, {"typical_p": 0.7}),
    "leviathan, presence and frequency": Case("leviathan", MODEL, PENALTIES, DEFINED),
    "leviathan, no repeated pair": Case("leviathan", BOTH, {"no_repeat_ngram_size": 2}, no_repeated_pair),
    "leviathan, several": Case("leviathan", BOTH, {"top_p": 0.9, "repetition_penalty": 1.5, **PENALTIES}, DEFINED),
    "leviathan, constraint": Case("leviathan", MODEL, DFA_OPTIONS, constrained),
    "match, presence and frequency": Case("match", LOOKUP, PENALTIES, DEFINED),
    "match, constraint": Case("match", BOTH, {**DFA_OPTIONS, "top_k": 6}, constrained),
}


def _sample(strategies: Sequence[Any], n: int, **options: Any) -> Generation:
    decoder = SpeculativeDecoder(small_model(3, V), small_model(1, V), strategies=[], check=False)
    return three_tokens(decoder, PROMPT, n, strategies=list(strategies), temperature=T, **options)


def _fit(case: Case, n: int, strategies: Sequence[Any] | None = None, broken: bool = False) -> Fit:
    out = _sample(case.strategies if strategies is None else strategies, n, acceptance=case.acceptance, **case.options)
    if strategies is None and not broken:
        assert 0.02 < out.stats.draft_acceptance_rate < 0.95  # put to the test
    return fit(cell(out.token_ids, V), case.law, tests=len(CASES))


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", CASES)
def test_three_tokens_follow_the_law_of_the_whole_pipeline(name: str, record_property: Any) -> None:
    result = _fit(CASES[name], SAMPLES)
    record_property("fit", str(result))
    assert result.holds, str(result)


@pytest.mark.parametrize("name", CASES)
def test_the_laws_of_the_cases_are_told_apart_from_the_plain_one(name: str) -> None:
    plain = three_token_law(small_model(3, V), PROMPT, T)
    sample = np.random.default_rng(5).choice(V**3, CONTROL_SAMPLES, p=plain)
    assert not fit(sample, CASES[name].law, tests=len(CASES)).holds


# -- controls ------------------------------------------------------------------------------------------------------


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["leviathan, several", "leviathan, presence and frequency"])
def test_penalties_that_count_unaccepted_draft_tokens_are_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    def everything_fed(ids: torch.Tensor, lengths: torch.Tensor, fed: torch.Tensor, on_path: torch.Tensor) -> Prefixes:
        real = torch.arange(fed.shape[1]) < torch.tensor(counts[-1])[:, None]
        return Prefixes(ids, lengths, fed, real[:, None].expand_as(on_path))

    counts: list[list[int]] = []
    planned = verification.Verifier.plan

    def plan(self: verification.Verifier, active: Any) -> verification.PassPlan:
        made = planned(self, active)
        counts.append(made.counts)
        return made

    monkeypatch.setattr(verification.Verifier, "plan", plan)
    monkeypatch.setattr(verify_pass, "Prefixes", everything_fed)
    result = _fit(CASES[name], CONTROL_SAMPLES, broken=True)
    record_property("fit", str(result))
    assert not result.holds, str(result)


class ConstrainedDrafter(SampledDrafter):
    """Drafts under the constraint. `fault` None: q is the masked law that the tokens are drawn from; "unmasked": the
    mask is left to the target, which is allowed too; the others are not."""

    name = "constrained"

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        texts = [[*map(int, r.tokens), int(r.last)] for r in requests]
        rows: list[list[tuple[int, torch.Tensor]]] = [[] for _ in requests]
        for _ in range(self.n_max):
            free = self._law(texts)
            allowed = torch.tensor([[accepts(TABLE, [*t[len(PROMPT) :], x]) for x in range(V)] for t in texts])
            masked = torch.where(allowed | ~allowed.any(dim=-1, keepdim=True), free, 0.0)
            masked = masked / masked.sum(dim=-1, keepdim=True)
            drawn = self._sample(free if self.fault in ("unmasked", "cuts-forbidden") else masked)
            claimed = masked if self.fault is None else free
            for text, row, token, law in zip(texts, rows, drawn.tolist(), claimed, strict=True):
                row.append((token, law))
                text.append(token)
        return [self._claim(row[: r.n_max], r) for row, r in zip(rows, requests, strict=True)]

    def _claim(self, row: list[tuple[int, torch.Tensor]], request: DraftRequest) -> Draft:
        length, text = len(row), [*map(int, request.tokens), int(request.last)][len(PROMPT) :]
        if self.fault == "cuts-forbidden":
            length = 0
            while length < len(row) and accepts(TABLE, [*text, *(t for t, _ in row[: length + 1])]):
                length += 1
        if length == 0:
            return Draft()
        return Draft([t for t, _ in row[:length]], None, torch.stack([law for _, law in row[:length]]), self.name)


@pytest.mark.fast(1)
@pytest.mark.parametrize("fault", [None, "unmasked", "cuts-forbidden", "claims-unmasked"])
def test_the_mask_belongs_into_q_and_never_cuts_a_draft(fault: str | None, record_property: Any) -> None:
    drafter = ConstrainedDrafter(small_model(1, V), V, fault)
    result = _fit(CASES["leviathan, constraint"], CONTROL_SAMPLES, [drafter])
    record_property("fit", str(result))
    assert result.holds == (fault in (None, "unmasked")), str(result)


# -- temperature towards zero --------------------------------------------------------------------------------------


@pytest.mark.fast(3)
@pytest.mark.parametrize("acceptance", ["match", "leviathan"])
@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.3}, PENALTIES, {"no_repeat_ngram_size": 2}, DFA_OPTIONS, {"typical_p": 0.9}],
    ids=["repetition", "presence", "ngram", "constraint", "typical"],
)
def test_low_temperatures_give_the_greedy_text_of_the_same_pipeline(options: dict[str, Any], acceptance: str) -> None:
    decoder = SpeculativeDecoder(small_model(3, V), small_model(1, V), check=False)
    prompts = [PROMPT, [1], [9, 9, 2]]
    common: dict[str, Any] = {"max_new_tokens": 20, "acceptance": acceptance, **options}
    greedy = decoder.generate(prompts, strategies=[], **common)
    for strategies in ([], LOOKUP, BOTH):
        out = decoder.generate(prompts, strategies=list(strategies), output_logprobs=True, **common)
        assert out.token_ids == greedy.token_ids
        cold = decoder.generate(prompts, strategies=list(strategies), temperature=1e-4, output_logprobs=True, **common)
        if "typical_p" not in options:  # the most typical token need not be the likeliest
            assert cold.token_ids == greedy.token_ids
        assert cold.finish_reasons == greedy.finish_reasons
        assert all(torch.tensor(row).isfinite().all() for row in [*out.logprobs, *cold.logprobs])
