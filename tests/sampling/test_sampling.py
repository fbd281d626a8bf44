"""Random numbers and the pipeline from logits to laws: the hash, the races, the warpers, the text processors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers.generation import logits_process as hf

from specdec import SpeculativeDecoder
from specdec.drafters import DraftModel, PromptLookup
from specdec.drafters.base import Draft
from specdec.sampling.sampling import (
    Purpose,
    Sampling,
    build_sampling,
    exponential,
    fold,
    fold_int,
    race,
    row_key,
    streams,
)
from specdec.sampling.sampling import uniform as uniform_of
from tests.helpers.laws import fit, next_laws, small_model
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy, oracle_logits

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]


# -- the hash --------------------------------------------------------------------------------------------------------


def test_fold_on_tensors_equals_fold_on_python_ints() -> None:
    rng = random.Random(1)
    corners = [0, 1, -1, 2**63 - 1, -(2**63)]
    keys = corners + [rng.randrange(-(2**63), 2**63) for _ in range(200)]
    wide = [0, 1, -1, 2**31, 2**63, 2**64 - 1, 2**64, -(2**70)] + [rng.randrange(-(2**80), 2**80) for _ in range(30)]
    for counter in wide:
        expected = [fold_int(key, counter) for key in keys]
        assert fold(torch.tensor(keys), counter).tolist() == expected
    counters = torch.tensor(keys[::-1])
    assert fold(torch.tensor(keys), counters).tolist() == [
        fold_int(k, c) for k, c in zip(keys, keys[::-1], strict=True)
    ]


def test_seeds_of_any_size_and_sign_give_keys_of_their_own() -> None:
    seeds = [*range(-50, 50), 2**31, 2**32, 2**63 - 1, 2**63, 2**63 + 1]  # told apart modulo 2**64
    keys = {row_key(seed, row) for seed in seeds for row in range(50)}
    assert len(keys) == len(seeds) * 50
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_no_two_random_numbers_of_a_call_are_one() -> None:
    """Purposes, positions, rows, rounds and ids never meet: 64-bit values, so that a meeting is no accident."""
    keys = torch.tensor([row_key(seed, row) for seed in (0, 1) for row in range(8)])
    at, ids = torch.arange(40), torch.arange(50)
    drawn = [streams(keys[:, None], at, Purpose.ACCEPT)]
    drawn += [fold(streams(keys[:, None], at, p)[..., None], ids) for p in (Purpose.SAMPLE, Purpose.RESIDUAL)]
    for number in range(12):
        round_keys = fold(keys, number)
        drawn.append(fold(streams(round_keys[:, None], at, Purpose.DRAFT)[..., None], ids))
    values = torch.cat([d.reshape(-1) for d in drawn]).numpy()
    assert len(np.unique(values)) == len(values)


def test_uniforms_stay_inside_zero_and_one_at_the_ends_of_the_hash() -> None:
    ends = torch.tensor([0, -1, 2**32 - 1, 2**32, -(2**32), -(2**33), 2**63 - 1, -(2**63), -(2**40)])
    u = uniform_of(ends)
    assert ((u > 0) & (u < 1)).all()
    e = -torch.log1p(-u)
    assert ((e > 0) & e.isfinite()).all()


def _rows(n: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([row_key(seed, row) for row in range(n)])


_KEY, _AT = torch.tensor(row_key(0, 0)), torch.tensor(3)
AXES = {
    "seeds": lambda n: streams(torch.tensor([row_key(seed, 0) for seed in range(n)]), _AT, Purpose.SAMPLE),
    "rows": lambda n: streams(_rows(n), _AT, Purpose.ACCEPT),
    "positions": lambda n: streams(_KEY, torch.arange(n), Purpose.ACCEPT),
    "ids": lambda n: fold(streams(_KEY, _AT, Purpose.SAMPLE), torch.arange(n)),
    "rounds": lambda n: streams(fold(_KEY, torch.arange(n)), _AT, Purpose.DRAFT),
    "purposes": lambda n: torch.stack([streams(_rows(n // 4), _AT, p) for p in Purpose], dim=1).reshape(-1),
}


@pytest.mark.parametrize("axis", AXES)
def test_uniforms_look_uniform_and_independent_along(axis: str) -> None:
    n = 100_000
    u = uniform_of(AXES[axis](n)).double().numpy()
    assert abs(u.mean() - 0.5) < 4 * np.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 4 * np.sqrt(1 / 180 / n)
    for lag in (1, 2, 3, 4, 7, 64):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4.5 / np.sqrt(n)
    for counts in (
        np.bincount((u * 256).astype(int), minlength=256),
        np.bincount((u[:-1:2] * 16).astype(int) * 16 + (u[1::2] * 16).astype(int), minlength=256),  # pairs
    ):
        statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert chi2.ppf(1e-4, 255) < statistic < chi2.ppf(1 - 1e-4, 255)  # too even is as wrong as too uneven


# -- races -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_races_on_a_vocabulary_of_100000_draw_the_law_its_tail_included() -> None:
    """Half of the mass lies on 60,000 tokens of about 1e-5 each, a fifth on tokens of 2e-5 down to 2e-7."""
    rng = np.random.default_rng(0)
    falling = np.geomspace(1, 0.01, 39_998)
    p = np.concatenate([[0.2, 0.1], np.full(60_000, 0.5 / 60_000), 0.2 * falling / falling.sum()])
    p = rng.permutation(p)
    law = torch.tensor(p, dtype=torch.float32)
    key = torch.tensor(row_key(12, 0))
    drawn = torch.cat([
        race(law, streams(key, torch.arange(start, start + 100), Purpose.SAMPLE)) for start in range(0, 1200, 100)
    ])  # fmt: skip
    magnitude = (np.log10(p) * -2).astype(int)  # tail tokens of one magnitude share 16 cells
    groups = np.where(p > 0.05, np.argsort(np.argsort(-p)), 2 + magnitude * 16 + np.arange(len(p)) % 16)
    _, group = np.unique(groups, return_inverse=True)
    result = fit(group[drawn.numpy()], np.bincount(group, weights=p))
    assert len(result.expected) > 20
    assert result.holds, str(result)


@pytest.mark.full
@pytest.mark.parametrize("rare", [1e-5, 1e-6])
def test_rare_tokens_come_as_often_as_their_probability_says(rare: float) -> None:
    """float32 uniforms would cut the noise's tail here."""
    n, chunk = 20_000_000, 2_000_000
    law, key, hits = torch.tensor([1 - rare, rare]), torch.tensor(row_key(3, 1)), 0
    for start in range(0, n, chunk):
        hits += int(race(law, streams(key, torch.arange(start, start + chunk), Purpose.SAMPLE)).sum())
    assert abs(hits - n * rare) < 4 * np.sqrt(n * rare)


def test_a_race_never_draws_a_token_without_weight_and_ignores_the_scale() -> None:
    stream = streams(torch.tensor(row_key(0, 0)), torch.arange(2000), Purpose.SAMPLE)
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    drawn = race(p, stream)
    assert set(drawn.tolist()) == {1, 3, 4}
    assert torch.equal(race(p * 2.0**-20, stream), drawn)
    assert (exponential(stream, 5) > 0).all()


# -- warpers ---------------------------------------------------------------------------------------------------------

WARPERS: list[dict[str, Any]] = [
    {},
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.85, "min_p": 0.05},
    {"typical_p": 0.8},
    {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.02},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "epsilon_cutoff": 0.003},
]


def _hf_warped(logits: torch.Tensor, temperature: float, cuts: dict[str, Any]) -> torch.Tensor:
    """transformers' warpers in the order in which its generate() applies them."""
    made = [
        hf.TemperatureLogitsWarper(temperature),
        hf.TopKLogitsWarper(cuts.get("top_k") or logits.shape[-1]),
        hf.TopPLogitsWarper(cuts.get("top_p", 1.0)),
    ]
    kinds = {
        "min_p": hf.MinPLogitsWarper,
        "typical_p": hf.TypicalLogitsWarper,
        "epsilon_cutoff": hf.EpsilonLogitsWarper,
        "eta_cutoff": hf.EtaLogitsWarper,
    }
    made += [kind(cuts[name]) for name, kind in kinds.items() if name in cuts]
    for warper in made:
        logits = warper(torch.zeros((len(logits), 0), dtype=torch.int64), logits)
    return logits


def _sampling(temperature: float, cuts: dict[str, Any]) -> Sampling:
    model = tiny_model("llama")
    return build_sampling(model, cuts, temperature, [], [], None, torch.device("cpu"))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("cuts", WARPERS, ids=str)
def test_warpers_equal_transformers_own_in_its_order(cuts: dict[str, Any], temperature: float) -> None:
    logits = torch.randn(40, 3, 200, generator=torch.Generator().manual_seed(4)) * 3
    mine = torch.softmax(_sampling(temperature, cuts).scores(logits), dim=-1).reshape(-1, 200)
    theirs = torch.softmax(_hf_warped(logits.reshape(-1, 200), temperature, cuts), dim=-1)
    assert torch.equal(mine > 0, theirs > 0)
    torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-7)
    if not {"typical_p", "epsilon_cutoff", "eta_cutoff"} & set(cuts):  # and the definitions, in float64
        exact = next_laws(logits.reshape(-1, 200).numpy(), temperature, **cuts)
        np.testing.assert_allclose(mine.numpy(), exact, rtol=2e-4, atol=1e-7)


def test_warpers_do_not_apply_to_greedy_decoding() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(4))
    assert torch.equal(_sampling(0.0, {"top_k": 2, "top_p": 0.5}).scores(logits), logits)


# -- temperature to its limits ---------------------------------------------------------------------------------------


def _decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model("llama"), tiny_model("llama", seed=1), check=False)


@pytest.mark.fast(1)
@pytest.mark.parametrize("acceptance", ["match", "leviathan"])
@pytest.mark.parametrize("strategies", [[], ["draft-model:n_max=5"], ["prompt-lookup", "draft-model:n_max=5"]], ids=str)
def test_low_temperatures_tend_to_the_argmax_and_extreme_ones_do_not_break(strategies: Any, acceptance: str) -> None:
    decoder, target = _decoder(), tiny_model("llama")
    options: dict[str, Any] = {"max_new_tokens": 24, "acceptance": acceptance, "strategies": strategies}
    greedy = oracle_greedy(target, PROMPT, 24)
    for temperature in (0.0, 1e-38, 1e-30, 1e-29, 1e-4):
        assert decoder.generate(PROMPT, temperature=temperature, **options).token_ids == [greedy], temperature
    for seed in range(2):
        text = decoder.generate(PROMPT, temperature=1e-2, seed=seed, **options).token_ids[0]
        logits = oracle_logits(target, PROMPT + text)[len(PROMPT) - 1 : -1]
        top = logits.topk(2)
        sure = (top.values[:, 0] - top.values[:, 1]) >= 20 * 1e-2
        assert sure.sum() > 12
        assert torch.equal(top.indices[sure, 0], torch.tensor(text)[sure])
    for temperature in (1e3, 1e30):
        out = decoder.generate([PROMPT] * 4, temperature=temperature, top_k=0, **options)
        assert out.finish_reasons == ["length"] * 4
        assert len({t for row in out.token_ids for t in row}) > 40  # nearly uniform over 128 tokens


@pytest.mark.fast(1)
def test_draft_equal_to_target_gives_no_empty_residual_over_ten_thousand_tokens() -> None:
    target = tiny_model("llama")
    decoder = SpeculativeDecoder(target, target, check=False)
    out = decoder.generate(
        PROMPT, temperature=0.7, max_new_tokens=250, num_return_sequences=40, batch_size=40, acceptance="leviathan"
    )
    assert out.finish_reasons == ["length"] * 40
    assert out.stats.emitted_tokens == 10_000
    assert out.stats.accepted_tokens >= 0.999 * out.stats.draft_tokens


# -- draft noise -----------------------------------------------------------------------------------------------------


class _Recorder:
    """Claims nothing and proposes junk; keeps what it is given."""

    name = "recorder"

    def __init__(self) -> None:
        self.noise: list[Any] = []

    def begin(self, row: int, prompt: Any) -> None:
        return None

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        return None

    def draft(self, requests: Any) -> list[Draft]:
        self.noise += [r.noise for r in requests]
        return [Draft([1, 2]) for _ in requests]


def test_every_round_of_every_row_gets_a_noise_key_of_its_own() -> None:
    recorder = _Recorder()
    decoder = SpeculativeDecoder(small_model(0, 13), strategies=[], check=False)
    decoder.generate([PROMPT] * 6, strategies=[recorder], temperature=0.8, max_new_tokens=20, batch_size=3)
    keys = [noise.round_key for noise in recorder.noise]
    assert len(set(keys)) == len(keys) > 60
    assert not set(keys) & {noise.key for noise in recorder.noise}


def _repeated_proposals(reuse: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How often a position that is drafted again gets the same token again, of how many. The draft's law is the same
    everywhere, so that only the noise can tell the drafts apart."""
    if reuse:
        monkeypatch.setattr("specdec.decoding.engine.fold_int", lambda key, counter: key)
    draft = small_model(1, 50)
    with torch.no_grad():
        draft.lm_head.weight.zero_()
    decoder = SpeculativeDecoder(small_model(0, 50), draft, check=False)
    same = total = 0
    for seed in range(3):
        last: dict[int, int] = {}
        options = {"temperature": 0.8, "seed": seed, "acceptance": "leviathan"}
        for r in decoder.rounds(PROMPT, 60, ["draft-model:n_max=5"], **options):
            drafted = {r.position + 1 + i: token for i, token in enumerate(r.draft)}
            again = drafted.keys() & last.keys()
            same, total = same + sum(drafted[k] == last[k] for k in again), total + len(again)
            last = drafted
    return same, total


@pytest.mark.full
def test_a_position_drafted_again_gets_fresh_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    same, total = _repeated_proposals(False, monkeypatch)
    assert total > 150
    assert same < 3 * total / 50
    same, total = _repeated_proposals(True, monkeypatch)
    assert same == total  # what this test must tell apart


# -- processors that read the text -----------------------------------------------------------------------------------


class _Bonus(hf.LogitsProcessor):
    """A user's processor: prefers ids that follow the newest one, depending on the text's length."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = scores.clone()
        out[:, (int(input_ids[0, -1]) + input_ids.shape[1]) % scores.shape[-1]] += 6.0
        return out


GREEDY = oracle_greedy(tiny_model("llama"), PROMPT, 24)
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": GREEDY[4]},
    "min_length": {"min_length": len(PROMPT) + 9, "eos_token_id": GREEDY[4]},
    "bad_words_ids": {"bad_words_ids": [[GREEDY[2]], [GREEDY[5], GREEDY[6]]]},
    "suppress_tokens": {"suppress_tokens": sorted({GREEDY[1], GREEDY[7]})},
    "begin_suppress_tokens": {"begin_suppress_tokens": [GREEDY[0]]},
    "sequence_bias": {"sequence_bias": [[[GREEDY[3]], -20.0], [[GREEDY[0], 17], 30.0]]},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 3},
    "forced_eos_token_id": {"forced_eos_token_id": 3, "eos_token_id": 3},
    "user": {"logits_processor": [_Bonus()]},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "logits_processor": [_Bonus()]},
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", PROCESSORS)
def test_greedy_text_with_processors_equals_transformers_and_plain(name: str) -> None:
    """Row 8 of the faults in the wild: penalties ignored, doubled or weakened."""
    options = PROCESSORS[name]
    ids = torch.tensor([PROMPT])
    theirs = tiny_model("llama").generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0,
        **{**options, "logits_processor": hf.LogitsProcessorList(options.get("logits_processor", []))},
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    assert theirs != GREEDY  # the option does something
    drafter, target = tiny_model("llama", seed=1), tiny_model("llama")
    for draft, strategies, acceptance in (
        (drafter, [], "match"),
        (drafter, [DraftModel(n_max=5)], "leviathan"),
        (drafter, [PromptLookup()], "match"),
        (target, [PromptLookup(ngram_min=2), DraftModel(n_max=20)], "leviathan"),  # long drafts that stand
    ):
        out = SpeculativeDecoder(target, draft, check=False).generate(
            [PROMPT, PROMPT[:3]], strategies=strategies, acceptance=acceptance, max_new_tokens=24, **options
        )
        assert out.token_ids[0] == theirs, strategies


def test_processors_come_without_a_warning_from_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("transformers.generation.configuration_utils.logger.warning_once", said.append)
    _decoder().generate(PROMPT, max_new_tokens=4, repetition_penalty=1.3, temperature=0.8, top_k=9)
    assert said == []
