"""What breaks the sampling pipeline is rejected by the laws of test_laws.py; temperatures towards zero are greedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec import SpeculativeDecoder
from specdec.decoding import verification, verify_pass
from specdec.drafters import DraftModel, PromptLookup
from specdec.drafters.base import Draft, DraftRequest
from specdec.sampling.prefixes import Prefixes
from tests.decoding.test_laws import PENALTIES, PROCESSORS, PROMPT, TABLE, V, law_with, pair, sampled
from tests.helpers.broken import SampledDrafter
from tests.helpers.dfa import accepts
from tests.helpers.laws import Fit, cell, check_fit, fit, small_model

CONTROL_SAMPLES = 2_500
LOOKUP = [PromptLookup(n_max=2)]
BOTH = [*LOOKUP, DraftModel(n_max=2)]
DFA_OPTIONS = PROCESSORS["constraint"][0]


def _fit(processor: str, strategies: list[Any]) -> Fit:
    out = sampled(pair(), strategies, CONTROL_SAMPLES, PROMPT, acceptance="leviathan", **PROCESSORS[processor][0])
    return fit(cell(out.token_ids, V), law_with(processor))


# -- controls ------------------------------------------------------------------------------------------------------


@pytest.mark.law
@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["several", "presence and frequency"])
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
    check_fit(_fit(name, BOTH), record_property, holds=False)


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


@pytest.mark.law
@pytest.mark.fast(1)
@pytest.mark.parametrize("fault", [None, "unmasked", "cuts-forbidden", "claims-unmasked"])
def test_the_mask_belongs_into_q_and_never_cuts_a_draft(fault: str | None, record_property: Any) -> None:
    drafter = ConstrainedDrafter(small_model(1, V), V, fault)
    check_fit(_fit("constraint", [drafter]), record_property, holds=fault in (None, "unmasked"))


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
