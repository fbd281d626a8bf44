"""The strategy early-exit: plain decoding's text, and the drafts of a slow oracle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import MptConfig, MptForCausalLM

from specdec import DraftModel, EarlyExit, PromptLookup, SpecdecError, SpeculativeDecoder
from specdec.drafters.self_speculation import strategy
from specdec.models.layer_subset import PassThrough
from specdec.models.runner import Runner
from tests.helpers.recording import Rerun
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

PROMPTS = [[1, 2, 3, 4, 5], [9, 8], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]


@pytest.mark.fast(2, full=4)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3", "mixtral", "phi3"])
def test_greedy_text_is_plain_decodings(kind: str, batch: int) -> None:
    model = tiny_model(kind)
    expected = [oracle_greedy(model, p, 16) for p in PROMPTS]
    decoder = SpeculativeDecoder(model, check=False)
    for drafter in (EarlyExit(layers=2), EarlyExit(skip=[1], n_max=7)):
        out = decoder.generate(PROMPTS, 16, strategies=[drafter], batch_size=batch)
        assert out.token_ids == expected
        assert out.stats.draft_tokens > 0


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_sampled_text_is_plain_decodings(rule: str) -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), check=False)
    chain = [PromptLookup(ngram_max=1), EarlyExit(layers=2, p_min=0.01)]
    options: dict[str, Any] = {"temperature": 0.9, "acceptance": rule, "seed": 5, "repetition_penalty": 1.2}
    plain = decoder.generate(PROMPTS, 16, strategies=[], **options)
    assert decoder.generate(PROMPTS, 16, strategies=chain, batch_size=2, **options).token_ids == plain.token_ids


def drafts_of(decoder: SpeculativeDecoder, drafter: Any, **options: Any) -> list[Any]:
    rounds = decoder.rounds(PROMPTS[3], max_new_tokens=20, strategies=[drafter], **options)
    return [(r.draft, r.accepted, r.tokens) for r in rounds]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 2}], ids=["greedy", "sampled"])
def test_the_first_layers_draft_what_a_model_of_only_these_would(options: dict[str, Any]) -> None:
    """A model of the first layers has the same keys and values in them, whatever comes after."""
    model = tiny_model("llama")
    short = copy.deepcopy(model)
    short.model.layers = short.model.layers[:2]
    short.config.num_hidden_layers = 2
    own = drafts_of(SpeculativeDecoder(model, check=False), EarlyExit(layers=2, n_max=3), **options)
    assert own == drafts_of(SpeculativeDecoder(model, short, check=False), DraftModel(n_max=3), **options)
    assert any(accepted > 0 for _, accepted, _ in own)


def test_any_layers_may_be_left_out_and_the_past_is_the_whole_models() -> None:
    model = tiny_model("llama")
    without = copy.deepcopy(model)
    without.model.layers[1] = PassThrough(without.model.layers[1], False)
    text = list(PROMPTS[3])
    for draft, _, tokens in drafts_of(SpeculativeDecoder(model, check=False), EarlyExit(skip="1", n_max=1)):
        if draft:
            with torch.no_grad():
                past = model(torch.tensor([text[:-1]]), use_cache=True).past_key_values
                logits = without(torch.tensor([text[-1:]]), past_key_values=past, use_cache=True).logits
            assert draft == [int(logits[0, -1].argmax())]
        text += tokens


def test_recorded_passes_of_the_target_and_of_its_layers_are_kept_apart() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    decoder.target = Runner(model, recorder=Rerun())
    for _ in range(2):
        for drafter in (EarlyExit(layers=1), EarlyExit(skip=[0, 2])):
            out = decoder.generate(PROMPTS, 16, strategies=[drafter], batch_size=2)
            assert out.token_ids == [oracle_greedy(model, p, 16) for p in PROMPTS]
            assert out.stats.draft_passes > 0


def test_no_cache_is_made_for_the_draft_and_the_model_is_left_alone() -> None:
    model = tiny_model("llama")
    before = list(model.model.layers)
    decoder = SpeculativeDecoder(model, check=False)
    decoder.generate(PROMPTS, 8, strategies=[EarlyExit()])
    assert {runner.skip for runner in decoder.target.subsets.values()} == {(1, 2), (0,)}  # that drafts, that verifies
    assert all(runner.pool.idle is None for runner in decoder.target.subsets.values())
    assert decoder.target.pool.idle is not None
    assert all(a is b for a, b in zip(model.model.layers, before, strict=True))
    subset = next(iter(decoder.target.subsets.values()))
    assert all(a is b for a, b in zip(model.parameters(), subset.view.original.parameters(), strict=True))


def test_a_layer_that_the_user_replaces_is_followed() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    decoder.generate(PROMPTS[3], 8, strategies=[EarlyExit(layers=1)])
    other = tiny_model("llama", seed=1)
    model.model.layers[0] = other.model.layers[0]
    drafts = drafts_of(decoder, EarlyExit(layers=1, n_max=3))
    assert drafts == drafts_of(SpeculativeDecoder(model, check=False), EarlyExit(layers=1, n_max=3))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_verify_pass_goes_on_from_the_layers_that_drafted(recorded: bool) -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), check=False)
    if recorded:
        decoder.target = Runner(decoder.target.model, recorder=Rerun())
    whole, resumed = (
        decoder.generate(PROMPTS, 16, strategies=[EarlyExit(layers=2, resume=resume)], batch_size=2, temperature=0.8)
        for resume in (False, True)
    )
    assert resumed.token_ids == whole.token_ids
    assert whole.provenance["resumed"] == {"passes": 0, "bytes_not_read": 0}
    found = resumed.provenance["resumed"]
    layers = decoder.target.model.model.layers[:2]
    assert 0 < found["passes"] < resumed.stats.verify_passes  # a row's last token may have no draft
    assert found["bytes_not_read"] == found["passes"] * sum(p.nbytes for p in layers.parameters())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_it_verifies_with_is_what_all_layers_would_give(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder(tiny_model(kind), check=False)

    def scores(resume: bool) -> list[float]:
        drafter = EarlyExit(layers=2, resume=resume, n_max=3)
        rounds = list(decoder.rounds(PROMPTS[3], max_new_tokens=12, strategies=[drafter], temperature=1.0))
        return [p for r in rounds for p in r.p]

    expected = torch.tensor(scores(False))
    torch.testing.assert_close(torch.tensor(scores(True)), expected, atol=1e-5, rtol=1e-5)
    # The control: states of the token before in every place.
    monkeypatch.setattr(strategy.SharedCore, "states", property(lambda self: vars(self)["kept"], late), raising=False)
    wrong = torch.tensor(scores(True))
    assert wrong.shape != expected.shape or not torch.allclose(wrong, expected, atol=1e-3)


class _Late(list[torch.Tensor]):
    """Keeps the states of the pass before."""

    def append(self, states: torch.Tensor) -> None:
        super().append(self[-1] if self else states)


def late(core: strategy.SharedCore, given: list[torch.Tensor]) -> None:
    vars(core)["kept"] = _Late(given)


def test_other_drafts_and_exact_mode_are_verified_by_all_layers() -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), check=False)
    drafter = EarlyExit(layers=2)
    for options in ({"strategies": [drafter], "exact": True}, {"strategies": [PromptLookup(ngram_max=1)]}):
        out = decoder.generate(PROMPTS, 12, **options)
        assert out.provenance["resumed"]["passes"] == 0
        assert out.token_ids == decoder.generate(PROMPTS, 12, strategies=[]).token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 3}, "layers=3 does not fit a target of 3 layers"),
        ({"skip": [0, 1, 2]}, "does not fit a target of 3 layers"),
        ({"skip": "2-5"}, "does not fit a target of 3 layers"),
        ({"skip": "two"}, "skip must list layers"),
        ({"skip": []}, "skip must list layers"),
        ({"layers": 1, "skip": [1]}, "not both"),
        ({"layers": 0}, "layers"),
        ({"n_min": 5}, "n_min <= n_max"),
    ],
)
def test_layers_that_do_not_fit_are_refused_in_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        SpeculativeDecoder(tiny_model("llama"), check=False).generate([1, 2], 4, strategies=[EarlyExit(**options)])


def test_a_refused_call_gives_its_cache_back() -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), check=False)
    decoder.generate([1, 2], 4, strategies=[])
    cache = decoder.target.pool.idle
    with pytest.raises(SpecdecError):
        decoder.generate([1, 2], 4, strategies=[EarlyExit(layers=9)])
    assert decoder.target.pool.idle is cache is not None


def test_models_that_do_not_work_without_a_layer_are_refused_by_name() -> None:
    model = MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=3, vocab_size=64)).eval()
    with pytest.raises(SpecdecError, match=r"mpt cannot draft without its layers \[2\]"):
        SpeculativeDecoder(model).generate([[1, 2, 3]], 4, strategies="early-exit:layers=2")
