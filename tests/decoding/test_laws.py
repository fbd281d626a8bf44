"""Every rule, strategy and length policy of the package: three sampled tokens follow the enumerated distribution of the
target, and those of a broken twin do not.

The cases are made from the registries, so a new entry without a case and a twin fails here. Every lossless rule meets
every kind of processor. `python scripts/measure_laws.py` runs all tests marked `law` with many samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import CostTable, Draft, DraftModel, DraftRequest, EarlyExit, PromptLookup, SpeculativeDecoder, SuffixStore
from specdec.decoding.acceptance import RULES, find_rule
from specdec.decoding.result import Generation
from specdec.drafters import STRATEGIES, chain, length
from specdec.drafters.length import LengthController
from specdec.drafters.policies import POLICIES, AdaEDL, Classifier, Confidence, Heuristic, PolicyLengths
from tests.helpers.broken import TWINS
from tests.helpers.dfa import DFA, Table, accepts
from tests.helpers.laws import Fit, cell, check_fit, fit, samples, small_model, three_token_law, three_tokens

pytestmark = pytest.mark.law

V, T, PROMPT = 13, 0.8, [5, 7, 5, 7, 5]
SAMPLES, CONTROLS = samples(3_000, 1_500), 2_000
CHAIN = (PromptLookup(n_max=2, ngram_min=2), DraftModel(n_max=2))
TREE = (PromptLookup(n_max=2, ngram_min=2), DraftModel(tree="3x2"))
LEVIATHAN: dict[str, Any] = {"acceptance": "leviathan"}


def sampled(decoder: SpeculativeDecoder, strategies: Any, n: int, prompt: list[int], **options: Any) -> Generation:
    return three_tokens(decoder, prompt, n, strategies=strategies, **options)


def pair(draft: tuple[int, int] = (1, V), sharp: float = 1.0, **options: Any) -> SpeculativeDecoder:
    """draft: seed and vocabulary; sharp: a factor of its logits."""
    model = small_model(*draft)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharp)
    return SpeculativeDecoder(small_model(3, V), model, strategies=[], check=False, **options)


def is_tested(out: Generation) -> bool:
    return 0.02 < out.stats.acceptance_rate_per_position[0] < 0.98 and out.stats.drafted_rounds > out.stats.rounds / 20


# -- every lossless rule with every kind of processor ------------------------------------------------------------------

BIAS = {(3,): 2.0, (7,): -1.5}
TABLE: Table = {s: {t: t % 3 for t in range(V) if t % 3 != s} for s in range(3)}


def penalties(logits: np.ndarray, texts: np.ndarray, prompt: int, presence: float, frequency: float) -> np.ndarray:
    counts = np.stack([np.bincount(text[prompt:], minlength=V) for text in texts])
    return logits - frequency * counts - presence * (counts > 0)


def biased(logits: np.ndarray, texts: np.ndarray, prompt: int) -> np.ndarray:
    return logits + np.array([BIAS.get((t,), 0.0) for t in range(V)])


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


PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.9}
PENALISED = partial(penalties, presence=1.5, frequency=0.9)
PROCESSORS: dict[str, tuple[dict[str, Any], Any]] = {  # options, and what they mean where laws.py does not know them
    "none": ({}, None),
    "temperature": ({"temperature": 0.4}, None),
    "top_k": ({"top_k": 2}, None),  # fewer tokens than a node has children
    "top_p": ({"top_p": 0.85}, None),
    "min_p": ({"min_p": 0.15}, None),
    "typical_p": ({"typical_p": 0.7}, None),
    "repetition penalty": ({"repetition_penalty": 1.8}, None),
    "presence and frequency": (PENALTIES, PENALISED),
    "logit bias": ({"sequence_bias": BIAS}, biased),
    "no repeated pair": ({"no_repeat_ngram_size": 2}, no_repeated_pair),
    "constraint": ({"logits_processor": [DFA(TABLE)]}, constrained),
    "several": ({"top_p": 0.9, "repetition_penalty": 1.5, **PENALTIES}, PENALISED),
}
ENUMERATED = ("top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def law_with(processor: str) -> np.ndarray:
    options, adjust = PROCESSORS[processor]
    cuts = {name: value for name, value in options.items() if name in ENUMERATED}
    return three_token_law(small_model(3, V), PROMPT, options.get("temperature", T), adjust=adjust, **cuts)


def own_rules(lossy: bool) -> list[str]:
    """Rules of the package by name; other tests register theirs."""
    made = {name: find_rule(name) for name in RULES}
    return [n for n, rule in made.items() if rule.lossy == lossy and rule.accepts.__module__.startswith("specdec.")]


@pytest.mark.fast(6)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("rule", own_rules(lossy=False))
def test_every_rule_follows_the_target_under_every_processor(rule: str, processor: str, record_property: Any) -> None:
    options, _ = PROCESSORS[processor]
    strategies = TREE if find_rule(rule).pick_child else CHAIN
    out = sampled(pair(), strategies, SAMPLES, PROMPT, acceptance=rule, **options)
    check_fit(fit(cell(out.token_ids, V), law_with(processor), tests=len(PROCESSORS)), record_property)
    assert is_tested(out)
    assert not out.lossy


@pytest.mark.parametrize("processor", [name for name in PROCESSORS if name != "none"])
def test_no_processor_leaves_the_distribution_as_it_was(processor: str) -> None:
    sample = np.random.default_rng(5).choice(V**3, 2_500, p=law_with("none"))
    assert not fit(sample, law_with(processor), tests=len(PROCESSORS)).holds


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", [f"{rule}: {fault}" for rule, faults in TWINS.items() for fault in faults])
def test_a_broken_rule_is_rejected(name: str, record_property: Any) -> None:
    rule, fault = name.split(": ")
    twin = TWINS[rule][fault]
    drafter = DraftModel(n_max=2) if twin.pick_child is None else DraftModel(tree="2x1")
    out = sampled(pair(), [drafter], 3 * CONTROLS, PROMPT, acceptance=twin)
    check_fit(fit(cell(out.token_ids, V), law_with("none")), record_property, holds=False)


@pytest.mark.fast(1)
@pytest.mark.parametrize("rule", own_rules(lossy=True))
def test_a_lossy_rule_is_told_apart_and_says_so(rule: str, record_property: Any) -> None:
    out = sampled(pair(), [DraftModel(n_max=2)], CONTROLS, PROMPT, acceptance=rule)
    check_fit(fit(cell(out.token_ids, V), law_with("none")), record_property, holds=False)
    assert out.lossy
    assert out.distances is not None


def test_the_page_names_every_lossy_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losslessness.md").read_text(encoding="utf-8")
    named = page.partition("**What is lossy.** The rules ")[2].partition(", and no other")[0]
    assert sorted(re.findall(r"`([\w-]+)`", named)) == sorted(own_rules(lossy=True))


def test_every_lossless_rule_has_a_broken_twin() -> None:
    assert set(own_rules(lossy=False)) == set(TWINS)


# -- every strategy ----------------------------------------------------------------------------------------------------

Setting = tuple[SpeculativeDecoder, Any, int]  # with a strategy and the size of the vocabulary
EVERY_ID = [1, 9, 2, 12, 3, 0, 8, 4, 6, 11, 10, 5, 7, 5]  # whatever comes next has come before
CORPUS = SuffixStore([np.random.default_rng(i).integers(0, V, 40).tolist() for i in range(9)])


def with_draft(strategy: Any, **options: Any) -> Callable[[Path], Setting]:
    return lambda _: (pair(**options), strategy, V)


def with_layers(strategy: Any) -> Callable[[Path], Setting]:
    return lambda _: (SpeculativeDecoder(small_model(3, V, num_hidden_layers=2), check=False), strategy, V)


def with_words(_: Path) -> Setting:
    from tests.drafters.test_intersection import TARGET
    from tests.drafters.test_intersection import pair as words

    return words(), DraftModel(n_max=2, translate="intersection"), TARGET


def with_eagle(**options: Any) -> Callable[[Path], Setting]:
    """A head with three ids fewer than tokens: those have q = 0, and must come from the residual."""

    def make(_: Path) -> Setting:
        from tests.drafters.test_eagle3_strategy import Eagle3, head_for

        target = small_model(3, V)
        head = head_for(target, seed=4, layer_ids=(0,), observed=1, draft_vocab_size=10)
        assert head.lm_head is not None
        head.lm_head.weight.mul_(0.3)
        return SpeculativeDecoder(target, check=False), Eagle3(head, **options), V

    return make


def with_dflash(folder: Path) -> Setting:
    from tests.drafters.test_dflash import DFlash, head_config, saved

    target = small_model(3, V, num_hidden_layers=2)
    head = saved(folder / "head", head_config(target, [0], num_hidden_layers=1, num_attention_heads=2), 5)
    return SpeculativeDecoder(target, check=False), DFlash(head), V


def with_mtp(_: Path) -> Setting:
    from tests.drafters.test_mtp import Mtp
    from tests.drafters.test_mtp import pair as layers

    target, mtp = layers("glm4_moe", vocab=V)
    return SpeculativeDecoder(target, check=False), Mtp(mtp, n_max=2), V


STRATEGY_CASES: dict[str, Callable[[Path], Setting]] = {
    "draft-model": with_draft(DraftModel(n_max=2)),
    "draft-model, p_min": with_draft(DraftModel(n_max=2, n_min=1, p_min=0.3)),
    "draft-model, smaller vocabulary": with_draft(DraftModel(n_max=2), draft=(1, V - 4)),
    "draft-model, larger vocabulary": with_draft(DraftModel(n_max=2), draft=(1, V + 4)),
    "draft-model, intersection": with_words,
    "draft-model, tree": with_draft(DraftModel(tree="4x2")),
    "draft-model, branches": with_draft(DraftModel(branches=3, p_split=0.15, p_min=0.15, n_max=2)),
    "draft-model, best nodes": with_draft(DraftModel(tree="opt-6", n_max=2)),
    "prompt-lookup": with_draft("prompt-lookup:n_max=2"),
    "recycling": with_draft("recycling:nodes=12:width=3:depth=3"),
    "suffix": with_draft("suffix"),
    "rest": lambda _: (pair(), STRATEGIES["rest"](store=CORPUS, nodes=8, n_max=3), V),
    "lookahead": with_draft("lookahead:window=3:ngram=3:guesses=3"),
    "ngram-simple": with_draft("ngram-simple:size_n=1:size_m=3"),
    "ngram-map-k": with_draft("ngram-map-k:size_n=1:size_m=3"),
    "ngram-map-k4v": with_draft("ngram-map-k4v:size_n=1:size_m=3"),
    "ngram-mod": with_draft("ngram-mod:n_match=1:n_min=1:n_max=3:table_size=64"),
    "ngram-cache": with_draft("ngram-cache"),
    "eagle3": with_eagle(n_max=2),
    "eagle3, tree": with_eagle(tree="4x2"),
    "dflash": with_dflash,
    "mtp": with_mtp,
    "early-exit": with_layers(EarlyExit(layers=1, n_max=2)),
}


def strategy_fit(name: str, n: int, folder: Path) -> tuple[Fit, Generation]:
    if name == "mtp":
        pytest.importorskip("tests.drafters.test_mtp")  # skipped where transformers has no MtpModel
    decoder, strategy, vocab = STRATEGY_CASES[name](folder)
    prompt = [t % vocab for t in (EVERY_ID if name != "ngram-cache" else [5, 7] * 7)]
    out = sampled(decoder, [strategy], n, prompt, **LEVIATHAN)
    return fit(cell(out.token_ids, vocab), three_token_law(decoder.target.model, prompt, T)), out


@pytest.mark.fast(5)
@pytest.mark.parametrize("name", STRATEGY_CASES)
def test_every_strategy_follows_the_target(name: str, tmp_path: Path, record_property: Any) -> None:
    result, out = strategy_fit(name, SAMPLES, tmp_path)
    check_fit(result, record_property)
    assert is_tested(out)


def flat(draft: Draft) -> Draft:
    """The draft with a q that its tokens were not sampled from: all are said to be equally likely."""
    tokens = torch.as_tensor(draft.tokens)
    vocab = V if draft.q is None else draft.q.shape[1]
    return replace(draft, q=(tokens >= 0)[:, None].expand(-1, vocab) / vocab)


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", STRATEGY_CASES)
def test_a_strategy_that_claims_another_q_is_rejected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    right = chain._checked
    monkeypatch.setattr(chain, "_checked", lambda *given: [flat(draft) for draft in right(*given)])
    check_fit(strategy_fit(name, CONTROLS, tmp_path)[0], record_property, holds=False)


def test_every_strategy_has_a_case() -> None:
    assert {name.split(",")[0] for name in STRATEGY_CASES} == set(STRATEGIES)


# -- every length policy -----------------------------------------------------------------------------------------------

# Two tokens look best at first, and one no longer worth it after a rejection; so lengths change within three tokens.
COSTS = CostTable((((1.0, 1.5, 1.7),),), (((0.05, 0.1, 0.15),),), widths=(1, 2, 3))
POLICY_CASES: dict[str, Any] = {
    "auto": "auto",
    "goodput": "goodput",
    "heuristic": Heuristic(start=1),
    "confidence": Confidence(0.5),
    "adaedl": AdaEDL(threshold=0.45, step=0.3),
    "classifier": Classifier((0.5, 1.0, 1.0), stop=0.6),
}


def policy_fit(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Fit, Generation]:
    monkeypatch.setattr(length, "_MAY_LOSE", 10.0)  # three tokens are worth no budget
    sharp = 1.0 if name in ("auto", "goodput") else 3.0
    decoder = pair(sharp=sharp, costs=COSTS)
    out = sampled(decoder, [DraftModel()], n, PROMPT, length_policy=POLICY_CASES[name], **LEVIATHAN)
    return fit(cell(out.token_ids, V), law_with("none")), out


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", POLICY_CASES)
def test_every_length_policy_follows_the_target(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    result, out = policy_fit(name, SAMPLES, monkeypatch)
    check_fit(result, record_property)
    assert len({r.drafted for row in out.stats.rows for r in row}) > 1


def takes_back(self: Any, index: int, request: DraftRequest, draft: Draft) -> Draft:
    """End the draft before the first sampled token that was unlikely: a stop that looks at what it takes back."""
    tokens, q = draft.tokens, draft.q
    assert isinstance(tokens, Tensor)
    assert q is not None
    unlikely = torch.nonzero(q.gather(1, tokens[:, None])[:, 0] < 0.2)
    return draft.first(int(unlikely[0, 0])) if len(unlikely) else draft


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", POLICY_CASES)
def test_a_length_policy_that_takes_back_sampled_tokens_is_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    for lengths in (PolicyLengths, LengthController):
        monkeypatch.setattr(lengths, "cut", takes_back)
    check_fit(policy_fit(name, CONTROLS, monkeypatch)[0], record_property, holds=False)


def test_every_length_policy_has_a_case() -> None:
    assert set(POLICY_CASES) == {name for name, made in POLICIES.items() if made is not None}  # fixed chooses nothing
