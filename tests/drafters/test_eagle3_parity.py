"""The head against published implementations, on random weights: logits within 1e-5, trees node by node.

`SPECDEC_EAGLE3` names another folder of such cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.drafters.eagle3 import EagleHead, TreePasses, TreeSize, grow
from specdec.models.attention import RAGGED, MaskBuilder
from specdec.models.kv_cache import RaggedCache
from tests.helpers.eagle3 import case_files, causal, head_of, read_case, weights_of

CLOSE = 1e-5
FILES = case_files()
every_case = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_there_are_cases() -> None:
    assert FILES


def context(head: EagleHead, case: dict[str, Tensor], entries: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and features of the first entries: the states of token j with the embedding of token j + 1.

    first: position of entry 0. SafeAILab begins with 0, speculators with 1; which it is changes only the rounding."""
    embeddings = head.embed(case["tokens"][:, 1 : entries + 1])
    return head(embeddings, case["aux"][:, :entries], first + torch.arange(entries)[None], causal(entries))


def chain(head: EagleHead, case: dict[str, Tensor], steps: int, first: int = 0) -> Tensor:
    """Draft steps over the ragged cache, on the head's own output and the true tokens; logits [steps, V_d]."""
    entries = int(case["n_context"])
    cache = RaggedCache(head.config.num_hidden_layers, 1, entries + steps)
    cache.aim(torch.arange(entries)[None], slice(0, 1), entries)
    embeddings = head.embed(case["tokens"][:, 1 : entries + 1])
    positions = first + torch.arange(entries)[None]
    logits, feature = head(embeddings, case["aux"][:, :entries], positions, causal(entries), cache)
    found = [logits[0, -1]]
    for step in range(1, steps):
        at = torch.tensor([[entries + step - 1]])
        cache.aim(at, slice(0, 1), entries + step)
        embeddings = head.embed(case["tokens"][:, entries + step : entries + step + 1])
        logits, feature = head(embeddings, feature[:, -1:], first + at, None, cache)
        found.append(logits[0, -1])
    return torch.stack(found)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@every_case
def test_context_pass(file: Path) -> None:
    case = read_case(file)
    head = head_of(case)
    logits, _ = context(head, case, case["aux"].shape[1])
    assert difference(logits[0], case["context_logits"]) < CLOSE


@every_case
def test_draft_steps(file: Path) -> None:
    case = read_case(file)
    assert difference(chain(head_of(case), case, len(case["chain_logits"])), case["chain_logits"]) < CLOSE


@every_case
def test_residual_after_the_norm(file: Path) -> None:
    case = read_case(file)
    head = head_of(case, norm_before_residual=True)
    logits, _ = context(head, case, case["aux"].shape[1], first=1)
    assert difference(logits[0], case["norm_before_residual_logits"]) < CLOSE
    assert difference(case["norm_before_residual_logits"], case["context_logits"]) > 0.01


@every_case
def test_normed_output_is_fed_back(file: Path) -> None:
    case = read_case(file)
    expected = case["norm_output_chain_logits"]
    assert difference(chain(head_of(case, norm_output=True), case, len(expected), 1), expected) < CLOSE
    assert difference(expected[1:], case["chain_logits"][1:]) > 0.01


def tree_of(head: EagleHead, case: dict[str, Tensor], size: TreeSize) -> tuple[list[int], list[int]]:
    """Tokens and parents of the dynamic tree after the context."""
    entries = int(case["n_context"])
    capacity = entries + size.slots
    cache = RaggedCache(head.config.num_hidden_layers, 1, capacity)
    cache.aim(torch.arange(entries)[None], slice(0, 1), entries)
    embeddings = head.embed(case["tokens"][:, 1 : entries + 1])
    positions = torch.arange(entries)[None]
    logits, features = head(embeddings, case["aux"][:, :entries], positions, causal(entries), cache)
    passes = TreePasses(head, MaskBuilder(head.config, RAGGED, torch.float32), cache, size.widths, capacity)
    passes.start(features[:, -1], torch.tensor([entries]))
    tree = grow(logits[:, -1].log_softmax(-1), size, passes)
    return head.to_target(tree.tokens)[0].tolist(), tree.parents[0].tolist()


def sizes(case: dict[str, Tensor]) -> list[tuple[str, TreeSize]]:
    tags = sorted({key.rsplit(".", 1)[0] for key in case if key.startswith("tree.")})
    numbers = [[int(part) for part in tag.split(".")[1:]] for tag in tags]
    return [(tag, TreeSize(k, depth, total)) for tag, (total, depth, k) in zip(tags, numbers, strict=True)]


@every_case
def test_dynamic_trees(file: Path) -> None:
    case = read_case(file)
    head = head_of(case)
    assert sizes(case)
    for tag, size in sizes(case):
        expected = case[f"{tag}.tokens"].tolist()
        size = TreeSize(size.top_k, size.depth, len(expected) - 1)
        tokens, parents = tree_of(head, case, size)
        assert tokens == expected[1:], tag
        depths, sees = [0], torch.eye(len(expected))
        sees[:, 0] = 1
        for node, parent in enumerate(parents):
            depths.append(depths[parent + 1] + 1)
            sees[node + 1] = torch.maximum(sees[node + 1], sees[parent + 1])
        assert depths == case[f"{tag}.depths"].tolist(), tag
        assert torch.equal(sees, case[f"{tag}.mask"].float()), tag


@every_case
def test_wrong_variants_are_found_out(file: Path) -> None:
    """Negative control: states in another order, no shift by one, and the normed output fed back."""
    case = read_case(file)
    head = head_of(case)
    entries = case["aux"].shape[1]
    low, middle, high = case["aux"].chunk(3, dim=-1)
    swapped = case | {"aux": torch.cat([high, middle, low], dim=-1)}
    unshifted = case | {"tokens": torch.cat([case["tokens"][:, :1], case["tokens"]], dim=1)}
    for wrong in (swapped, unshifted):
        assert difference(context(head, wrong, entries)[0][0], case["context_logits"]) > 0.1
    assert difference(chain(head_of(case, norm_output=True), case, 3), case["chain_logits"]) > 0.01
    assert "d2t" in weights_of(case)
