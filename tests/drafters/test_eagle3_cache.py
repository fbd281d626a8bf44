"""Entries fed a few at a time, trimmed and fed again, to ragged rows: equal to computing each row from scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters.eagle3 import EagleHead
from specdec.errors import SpecdecError
from tests.helpers.eagle3 import Rows, causal, from_scratch, random_head

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "num_hidden_layers": 3, "qk_norm": True},
    "biases": {"biases": ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "down_proj")},
    "eagle-1": {
        "version": 1, "observed": 1, "target_hidden_size": 16, "final_norm": False, "draft_vocab_size": 30,
        "num_hidden_layers": 2,
    },
    "llama3 rope": {
        "rope": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn": {
        "rope": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
        "max_position_embeddings": 64,
    },
    "part of a head": {"rope": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
}  # fmt: skip


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding, in units of the largest number: heads without a final norm give large ones."""
    return float((a - b).abs().max()) < 2e-5 * max(1.0, float(b.abs().max()) / 10)


@pytest.mark.parametrize("name", OPTIONS)
def test_rounds_with_trimming_equal_computing_from_scratch(name: str) -> None:
    """Each round feeds what was accepted, from the target's states, then drafts on the head's own output; the drafted
    entries are overwritten by the next round."""
    head = random_head(1, **OPTIONS[name])
    rng = torch.Generator().manual_seed(2)
    batch, capacity, drafted = 3, 40, 3
    hidden = head.config.hidden_size
    embeddings = torch.randn((batch, capacity, hidden), generator=rng)
    states = torch.randn((batch, capacity, head.config.observed_size), generator=rng)
    features = head.project(states)
    rows, lengths = Rows(head, batch, capacity), [0] * batch
    for accepted in ([5, 1, 8], [2, 1, 4], [0, 3, 1], [4, 1, 0]):
        width = max(accepted)
        index = (torch.tensor(lengths)[:, None] + torch.arange(width)).clamp(max=capacity - 1)
        pick = index[..., None].expand(-1, -1, hidden)
        logits, out = rows.feed(embeddings.gather(1, pick), features.gather(1, pick), lengths, accepted)
        lengths = [n + a for n, a in zip(lengths, accepted, strict=True)]
        expected = [
            from_scratch(head, embeddings[b : b + 1, :n], features[b : b + 1, :n]) for b, n in enumerate(lengths)
        ]
        for b, count in enumerate(accepted):
            if count:
                assert close(logits[b, :count], expected[b][0][0, -count:])
                assert close(out[b, :count], expected[b][1][0, -count:])
        feature = torch.cat([e[1][:, -1:] for e in expected])
        own = [(embeddings[b : b + 1, :n], features[b : b + 1, :n]) for b, n in enumerate(lengths)]
        for step in range(drafted):
            token = torch.randn((batch, 1, hidden), generator=rng)
            logits, new = rows.feed(token, feature, [n + step for n in lengths], [1] * batch)
            for b in range(batch):
                own[b] = (
                    torch.cat([own[b][0], token[b : b + 1]], dim=1),
                    torch.cat([own[b][1], feature[b : b + 1]], dim=1),
                )
                assert close(logits[b, 0], from_scratch(head, *own[b])[0][0, -1])
            feature = new


def test_what_is_drafted_does_change_what_follows_in_its_round() -> None:
    """Negative control: without trimming, the entries of rejected drafts would be seen."""
    head = random_head(1)
    rng = torch.Generator().manual_seed(2)
    embeddings, features = (torch.randn((1, 6, 16), generator=rng) for _ in range(2))
    rows = Rows(head, 1, 10)
    rows.feed(embeddings[:, :3], features[:, :3], [0], [3])
    rows.feed(embeddings[:, 5:], features[:, 5:], [3], [1])  # a draft that is rejected
    untrimmed, _ = rows.feed(embeddings[:, 3:4], features[:, 3:4], [4], [1])
    trimmed, _ = rows.feed(embeddings[:, 3:4], features[:, 3:4], [3], [1])
    expected = from_scratch(head, embeddings[:, :4], features[:, :4])[0][:, -1:]
    assert close(trimmed, expected)
    assert not torch.allclose(untrimmed, expected, atol=1e-2)


def test_frequencies_stay_in_float32() -> None:
    head = random_head(0)
    frequencies = head.frequencies.clone()
    assert torch.equal(head.to(torch.bfloat16).frequencies, frequencies)
    assert head.fc.weight.dtype == torch.bfloat16
    logits, feature = head(*(torch.randn(1, 3, n) for n in (16, 60)), torch.arange(3)[None], causal(3))
    assert logits.dtype == feature.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "unheard"])
def test_rope_that_depends_on_the_text_is_refused(kind: str) -> None:
    with pytest.raises(SpecdecError, match=f"rope_type '{kind}' are not supported: default"):
        random_head(0, rope={"rope_type": kind, "rope_theta": 100.0})


def test_rope_without_its_parameters_is_refused() -> None:
    with pytest.raises(SpecdecError, match="rope_type 'llama3' cannot be set up: Missing required keys"):
        random_head(0, rope={"rope_type": "llama3", "rope_theta": 100.0})


def wide(states: int) -> tuple[EagleHead, Tensor]:
    head = random_head(0, hidden_size=12, target_hidden_size=4)
    return head, torch.randn(1, 2, states)


def test_states_are_known_by_their_width() -> None:
    head = random_head(0)
    embeddings, positions = torch.randn(1, 2, 16), torch.arange(2)[None]
    states = torch.randn(1, 2, 60)
    by_width, _ = head(embeddings, states, positions, causal(2))
    said, _ = head(embeddings, head.project(states), positions, causal(2), observed=False)
    assert torch.equal(by_width, said)
    with pytest.raises(SpecdecError, match="states have the width 40, and the head takes 16 or 60"):
        head(embeddings, torch.randn(1, 2, 40), positions, causal(2))


def test_a_target_whose_three_states_are_as_wide_as_the_head() -> None:
    """SafeAILab and SGLang would take its states for the head's own output and leave out fc."""
    head, states = wide(12)
    embeddings, positions = torch.randn(1, 2, 12), torch.arange(2)[None]
    with pytest.raises(SpecdecError, match="say which"):
        head(embeddings, states, positions, causal(2))
    observed, _ = head(embeddings, states, positions, causal(2), observed=True)
    own, _ = head(embeddings, states, positions, causal(2), observed=False)
    assert not torch.allclose(observed, own)


def test_draft_ids_over_the_targets_vocabulary() -> None:
    head = random_head(0)
    assert head.d2t is not None
    ids = head.to_target(torch.arange(12))
    probabilities = torch.rand(2, 3, 12).softmax(-1)
    spread = head.over_target(probabilities, 30)
    assert torch.equal(spread[..., ids], probabilities)
    assert (spread != 0).sum() == probabilities.numel()
    fewer = head.over_target(probabilities, 20, float("-inf"))
    assert torch.equal(fewer, head.over_target(probabilities, 30, float("-inf"))[..., :20])
    padded = head.over_target(probabilities, 33, float("-inf"))
    assert padded[..., 30:].eq(float("-inf")).all()
