"""Processors over whole passes: the numbers of transformers' own processors, called on one prefix at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as hf

from specdec import DraftModel, PromptLookup, SpecdecError, SpeculativeDecoder
from specdec.sampling.prefixes import History, Prefixes, chain_paths
from specdec.sampling.processors import VECTORISED, PresenceFrequencyPenalty
from specdec.sampling.processors import apply_processors as apply_texts
from specdec.sampling.sampling import build_sampling
from specdec.sampling.texts import KnownTexts
from tests.helpers.laws import small_model
from tests.helpers.prefixes import differences, one_by_one, random_pass
from tests.helpers.tiny import tiny_model

V = 11  # so few ids that texts repeat themselves
EOS = [3, 7]
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
MODEL = tiny_model("llama", vocab=V)


class _Parity(hf.LogitsProcessor):
    """A user's processor: what it adds depends on the whole prefix."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.arange(scores.shape[-1]) * (int(input_ids.sum()) % 5)


FIELDS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 0.6},
    "frequency_penalty": {"frequency_penalty": -0.4, "presence_penalty": 0.3},
    "no_repeat_1": {"no_repeat_ngram_size": 1},
    "no_repeat_2": {"no_repeat_ngram_size": 2},
    "no_repeat_3": {"no_repeat_ngram_size": 3},
    "bad_words": {"bad_words_ids": [[4], [1, 2], [5, 5], [0, 1, 2, 3], [7]]},
    "sequence_bias": {"sequence_bias": [[[4], -2.5], [[1, 2], 3.0], [[6, 2], 1.25], [[8, 1, 9], -9.0]]},
    "min_length": {"min_length": 12},
    "min_new_tokens": {"min_new_tokens": 5},
    "suppress_tokens": {"suppress_tokens": [0, 9]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [2, 8]},
    "forced_bos": {"forced_bos_token_id": 6},
    "forced_eos": {"forced_eos_token_id": [3, 7]},
    "decay": {"exponential_decay_length_penalty": (2, 1.3)},
    "remove_invalid_values": {"remove_invalid_values": True},
    "all": {
        "repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.1, "no_repeat_ngram_size": 3,
        "bad_words_ids": [[1, 2]], "sequence_bias": [[[5], 1.0]], "min_new_tokens": 4, "suppress_tokens": [10],
        "begin_suppress_tokens": [2], "forced_eos_token_id": 3, "exponential_decay_length_penalty": (3, 1.1),
    },
}  # fmt: skip
USERS: dict[str, list[Any]] = {
    "user": [_Parity()],
    "function": [lambda ids, scores: scores * (1 + ids.shape[1] % 3)],
    "warpers as processors": [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(4), hf.TopPLogitsWarper(0.8)],
    "repetition of the output": [hf.RepetitionPenaltyLogitsProcessor(1.4, prompt_ignore_length=3)],
    "watermark": [hf.WatermarkLogitsProcessor(V, "cpu", greenlist_ratio=0.4)],
}
with suppress(ValueError):  # older versions of transformers take a number only
    USERS["repetition with a padded prompt"] = [hf.RepetitionPenaltyLogitsProcessor(1.4, torch.tensor([2]))]


def _pass(fields: dict[str, Any], users: Sequence[Any], seed: int, tree: bool) -> History:
    sampling = build_sampling(MODEL, fields, 0.0, EOS, users, None, torch.device("cpu"))
    assert sampling.row_processors is not None
    build = sampling.row_processors
    return random_pass(lambda row, prompt: build(row, prompt, 6), V, seed, tree)


def apply_processors(scores: torch.Tensor, history: History) -> torch.Tensor:
    return apply_texts(scores, KnownTexts.of(history, scores))


def _scores(history: History, seed: int, broken: bool = False) -> torch.Tensor:
    scores = torch.randn(*history.fed.shape, V, generator=torch.Generator().manual_seed(seed)) * 4
    scores[scores.abs() < 0.3] = 0.0
    scores[..., 5][scores[..., 5] > 2] = float("-inf")
    if broken:
        scores[0, 0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    return scores


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", [*FIELDS, *USERS])
def test_a_pass_gives_the_numbers_of_transformers_prefix_by_prefix(name: str, tree: bool) -> None:
    if name in ("bad_words", "sequence_bias", "all") and VERSION < (5, 24):
        pytest.skip("older versions of transformers leave out a sequence that the text before it only just fits")
    fields, users = FIELDS.get(name, {}), USERS.get(name, [])
    changed = 0
    for seed in range(8):
        history = _pass(fields, users, seed, tree)
        scores = _scores(history, seed, broken=name == "remove_invalid_values")
        expected = one_by_one(scores, history)
        assert differences(apply_processors(scores.clone(), history), expected, history) == 0, seed
        changed += differences(scores, expected, history)
    assert changed > 0  # the option does something


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "name", ["repetition_penalty", "frequency_penalty", "no_repeat_1", "no_repeat_2", "bad_words", "decay", "user"]
)
def test_looking_at_unaccepted_or_foreign_tokens_is_noticed(
    name: str, tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same pass, but every position sees all that is fed."""
    wrong = 0
    for seed in range(8):
        history = _pass(FIELDS.get(name, {}), USERS.get(name, []), seed, tree)
        scores = _scores(history, seed)
        expected = one_by_one(scores, history)
        with monkeypatch.context() as patch:
            patch.setattr(History, "path", lambda self, row, column: range(self.fed.shape[1]))
            patch.setattr(History, "on_path", lambda self, columns: torch.ones(5, columns, 6, dtype=torch.bool))
            wrong += differences(apply_processors(scores.clone(), history), expected, history)
    assert wrong > 0


@pytest.mark.parametrize("name", [n for n in FIELDS if n != "forced_bos"])
def test_drafting_sees_the_known_text_alone(name: str) -> None:
    """A draft step: one law a row, nothing fed, everything so far known."""
    if name in ("bad_words", "sequence_bias", "all") and VERSION < (5, 24):
        pytest.skip("older versions of transformers leave out a sequence that the text before it only just fits")
    for seed in range(8):
        history = _pass(FIELDS[name], [], seed, False)
        step = History(history.known, history.fed[:, :0], history.processors, [1, 1, 1, 1, 0])
        scores = _scores(history, seed)[:, :1]
        out = apply_processors(scores.clone(), step)
        for b in range(4):
            row = scores[b, 0][None].clone()
            for processor in step.processors[b]:
                row = processor(step.known[b][None], row)
            assert torch.equal(out[b, 0], row[0])


def test_newest_ids_reach_back_over_the_known_text_and_stop_at_its_start() -> None:
    ids, fed = torch.tensor([[1, 2, 3], [4, 99, 99]]), torch.tensor([[5, 6], [7, 8]])
    tail = Prefixes(ids, torch.tensor([3, 1]), fed, chain_paths(2, 2, 2, ids.device)).tail(4)
    assert tail.tolist() == [[[1, 2, 3, 5], [2, 3, 5, 6]], [[-1, -1, 4, 7], [-1, 4, 7, 8]]]


def test_every_processor_of_a_generation_config_has_a_vectorised_form() -> None:
    built = _pass({**FIELDS["all"], **FIELDS["forced_bos"], **FIELDS["min_length"]}, [], 0, False)
    assert {type(p) for p in built.processors[0]} <= set(VECTORISED)


class _NoReads(TorchDispatchMode):
    """Refuses what makes the host wait for a device, or sends something there."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refused = ("_local_scalar_dense", "nonzero", "equal", "unique", "_unique2", "lift_fresh")
        assert function.overloadpacket.__name__ not in refused
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FIELDS)
def test_nothing_is_read_from_the_device_or_sent_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tree in (False, True):
        history = _pass(FIELDS[name], [], 3, tree)
        scores = _scores(history, 3)
        texts = KnownTexts.of(history, scores)  # once a call; what follows is recorded
        assert None not in [stage.signature for stage in texts.stages]
        with monkeypatch.context() as patch, _NoReads():
            for name_of in ("tolist", "cpu", "item"):
                patch.setattr(torch.Tensor, name_of, None)
            patch.setattr(torch, "from_numpy", None)
            apply_texts(scores, replace(texts, history=None))
            with pytest.raises(AssertionError):
                torch.tensor([1])
            with pytest.raises(AssertionError):
                one_by_one(scores, _pass({}, [lambda ids, s: s * int(ids[0, -1])], 3, tree))


# -- presence and frequency penalties --------------------------------------------------------------------------------


def test_presence_and_frequency_penalties_count_generated_ids_only() -> None:
    processor = PresenceFrequencyPenalty(presence=0.5, frequency=0.25, prompt_length=2)
    out = processor(torch.tensor([[1, 2, 3, 3, 4]]), torch.zeros(1, 6))
    assert out.tolist() == [[0.0, 0.0, 0.0, -1.0, -0.75, 0.0]]


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "strategies", [[], [PromptLookup()], [PromptLookup(ngram_min=2), DraftModel(n_max=5)]], ids=len
)
def test_greedy_text_with_presence_and_frequency_penalties_is_that_of_transformers(strategies: Any) -> None:
    prompt, model = [5, 6, 7, 8, 9, 5, 6, 7], tiny_model("llama")
    ids = torch.tensor([prompt])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0,
        logits_processor=hf.LogitsProcessorList([PresenceFrequencyPenalty(2.0, 1.5, len(prompt))]),
    )[0, len(prompt) :].tolist()  # fmt: skip
    decoder = SpeculativeDecoder(model, tiny_model("llama", seed=1), check=False)
    options: dict[str, Any] = {"max_new_tokens": 24, "strategies": strategies}
    out = decoder.generate([prompt, [1]], presence_penalty=2.0, frequency_penalty=1.5, **options)
    assert out.token_ids[0] == theirs
    assert decoder.generate(prompt, **options).token_ids[0] != theirs


def test_presence_and_frequency_penalties_come_after_the_repetition_penalty() -> None:
    fields = {
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "no_repeat_ngram_size": 2,
        "sequence_bias": [[[1], 1.0]],
    }
    kinds = [type(p).__name__ for p in _pass(fields, [], 0, False).processors[0]]
    assert kinds == [
        "SequenceBiasLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "PresenceFrequencyPenalty",
        "NoRepeatNGramLogitsProcessor",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [2.5, -3, float("nan"), True, "a"])
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SpecdecError, match=name):
        SpeculativeDecoder(tiny_model("llama"), check=False).generate([1, 2], 2, **{name: value})


@pytest.mark.parametrize("name", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"])
def test_processors_of_encoders_are_refused_by_name(name: str) -> None:
    with pytest.raises(SpecdecError, match=f"{name}.*needs an encoder"):
        SpeculativeDecoder(tiny_model("llama"), check=False).generate([1, 2], 2, **{name: 2})


def test_prefix_allowed_tokens_fn_gets_the_number_of_its_prompt() -> None:
    seen: set[tuple[int, int]] = set()

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        seen.add((prompt, int(ids[0])))
        return [10 + prompt]

    decoder = SpeculativeDecoder(tiny_model("llama"), check=False)
    out = decoder.generate(
        [[1, 2], [3], [4]], 3, prefix_allowed_tokens_fn=allowed, num_return_sequences=2, temperature=1.0
    )
    assert out.token_ids == [[10 + i // 2] * 3 for i in range(6)]
    assert seen == {(0, 1), (1, 3), (2, 4)}


def test_renormalisation_changes_no_law() -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), check=False)
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 9, "output_logprobs": True, "max_new_tokens": 12}
    plain = decoder.generate([1, 2, 3], **options)
    again = decoder.generate([1, 2, 3], renormalize_logits=True, **options)
    assert again.token_ids == plain.token_ids
    torch.testing.assert_close(torch.tensor(again.logprobs), torch.tensor(plain.logprobs), atol=1e-6, rtol=0)


PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]


class _Witness(hf.LogitsProcessor):
    """Changes nothing; remembers every text it is shown."""

    prefix_only = True

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(input_ids[0].tolist()))
        return scores


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("strategies", [[], [PromptLookup()], [PromptLookup(), DraftModel(n_max=5)]], ids=len)
def test_processors_see_the_accepted_text_and_its_drafts_and_nothing_else(strategies: Any, temperature: float) -> None:
    witness = _Witness()
    decoder = SpeculativeDecoder(small_model(0, 13), small_model(1, 13), check=False)
    rounds = list(
        decoder.rounds(
            PROMPT, strategies=strategies, logits_processor=[witness], temperature=temperature, max_new_tokens=20
        )
    )
    text, allowed = list(PROMPT), set()
    for r in rounds:
        assert r.position == len(text) - 1
        allowed |= {(*text, *r.draft[:n]) for n in range(len(r.draft) + 1)}
        text += r.tokens
    seen = set(witness.seen)
    assert {tuple(text[:n]) for n in range(len(PROMPT), len(text))} <= seen  # each at its own accepted prefix
    assert seen <= allowed


def test_processors_of_a_batch_never_see_padding() -> None:
    """Rows whose drafts are shorter than their neighbours': no made-up ids behind their text."""
    witness = _Witness()
    decoder = SpeculativeDecoder(small_model(0, 13), strategies=[], check=False)
    prompts = [[5, 7, 5, 7, 5, 7], [1, 2, 3], [4]]
    out = decoder.generate(
        prompts, strategies=[PromptLookup(ngram_min=2)], logits_processor=[witness], temperature=0.8,
        max_new_tokens=12,
    )  # fmt: skip
    for prompt, row in zip(prompts, out.token_ids, strict=True):
        whole = prompt + row
        mine = [t for t in witness.seen if list(t[: len(prompt)]) == prompt]
        assert {tuple(whole[:n]) for n in range(len(prompt), len(whole))} <= set(mine)
    assert len(witness.seen) == out.stats.draft_tokens + out.stats.rounds  # one call a tested position
