"""What tests of the decoding loop share: prompts, weaker copies of a model, drafters that follow a script, counters."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specdec import Draft, DraftRequest


def random_ids(n: int, seed: int = 0, vocab: int = 128) -> list[int]:
    """`n` ids of a seeded generator."""
    return [random.Random(f"{seed}/{i}").randrange(vocab) for i in range(n)]


def quoting_ids(n: int, seed: int = 0, block: int = 7, vocab: int = 128) -> list[int]:
    """A prompt that repeats a block of ids, so that lookups find something."""
    pattern = random_ids(block, seed, vocab)
    return (pattern * (n // block + 1))[:n]


def weaker(model: Any, noise: float = 0.1, seed: int = 0) -> Any:
    """A copy of `model` whose weights are off by `noise` standard deviations: a draft that is often right."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            scale = float(p.std()) if p.numel() > 1 else 0.0
            p.add_(noise * scale * torch.randn(p.shape, generator=generator))
    return other


def looping(model: Any) -> Any:
    """A copy of a Llama-like model that hardly looks back: its text soon repeats itself, so that lookups are right
    often, but not always."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
    return other


def rest_of(texts: Sequence[Sequence[int]], ids: Sequence[int]) -> list[int]:
    """How the text that starts with `ids` goes on; nothing where none does."""
    for text in texts:
        if list(text[: len(ids)]) == list(ids):
            return list(text[len(ids) :])
    return []


class Scripted:
    """A drafter as a user would write it: `script(ids so far) -> proposed ids`. It records what it is told."""

    def __init__(self, script: Callable[[list[int]], Sequence[int]], name: str = "scripted"):
        self.script, self.name = script, name
        self.events: list[tuple[Any, ...]] = []

    def begin(self, row: int, prompt: Any) -> None:
        self.events.append(("begin", row, [int(t) for t in prompt]))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for r in requests:
            tokens = list(self.script([*map(int, r.tokens), int(r.last)]))
            self.events.append(("draft", r.row, r.n_max, len(tokens)))
            drafts.append(Draft(tokens))
        return drafts

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        self.events.append(("accept", row, n_accepted, is_other))


def right_until(texts: Sequence[Sequence[int]], length: int, wrong_at: int | None = None) -> Callable[..., list[int]]:
    """A script that proposes `length` right tokens, the one at `wrong_at` replaced by a wrong one."""

    def script(ids: list[int]) -> list[int]:
        tokens = rest_of(texts, ids)[:length]
        if wrong_at is not None and wrong_at < len(tokens):
            tokens[wrong_at] = (tokens[wrong_at] + 1) % 128
        return tokens

    return script


@contextmanager
def counting_passes(*models: Any) -> Iterator[list[int]]:
    """Counts the forward passes of `models`: a list with one entry a pass, its number of input ids."""
    passes: list[int] = []

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        passes.append(kwargs["input_ids"].numel())

    handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in models if m is not None]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def generated_by_transformers(model: Any, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    """`generate(do_sample=False)` of transformers: generated ids only."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
        **{"pad_token_id": 0, **options},
    )  # fmt: skip
    return [int(t) for t in out[0, len(prompt) :]]


def check_counts(out: Any) -> None:
    """Invariants of the statistics that hold for every call, whatever it did."""
    stats = out.stats.to_dict()
    parts = [stats, *stats["rows"]]
    for part in parts:
        assert part["generated_tokens"] == part["emitted_tokens"]
        assert part["rounds"] == 0 or part["tokens_per_round"] == part["emitted_tokens"] / part["rounds"]
    for row, origins in zip(out.stats.rows, out.origins, strict=True):
        assert all(r.own and r.tokens == r.accepted + 1 for r in row[:-1])  # only the last round can end in its draft
        assert sum(r.tokens for r in row) == sum(r.accepted for r in row) + sum(r.own for r in row) == len(origins)
        assert sum(r.accepted for r in row) == sum(origin is not None for origin in origins)
    for part in [*parts, *stats["strategies"].values()]:
        assert 0 <= part["accepted_tokens"] <= part["draft_tokens"]
        assert sum(part["acceptance_histogram"]) == part["drafted_rounds"] <= part["rounds"]
        assert sum(n * i for i, n in enumerate(part["acceptance_histogram"])) == part["accepted_tokens"]
        by_length = {int(k): counts for k, counts in part["acceptance_histogram_per_length"].items()}
        pooled = [sum(h[n] for h in by_length.values() if n < len(h)) for n in range(max(by_length, default=-1) + 1)]
        assert pooled == part["acceptance_histogram"]
        assert all(len(h) == k + 1 and sum(h) > 0 for k, h in by_length.items())
    for name in ("rounds", "drafted_rounds", "draft_tokens", "accepted_tokens", "generated_tokens", "emitted_tokens"):
        assert stats[name] == sum(row[name] for row in stats["rows"])
    for name, upstreams in (
        ("drafted_rounds", "n_gen_drafts"), ("draft_tokens", "n_gen_tokens"), ("accepted_tokens", "n_acc_tokens")
    ):  # fmt: skip
        assert stats[name] == sum(s[name] for s in stats["strategies"].values())
        assert stats[name] == sum(s[upstreams] for s in stats["strategies"].values())
    for name, part in stats["strategies"].items():
        assert part["accepted_tokens"] == sum(row.count(name) for row in out.origins)
    assert [row["emitted_tokens"] for row in stats["rows"]] == [len(ids) for ids in out.token_ids]
    assert [len(o) for o in out.origins] == [len(ids) for ids in out.token_ids]
    if out.logprobs is not None:
        assert [len(p) for p in out.logprobs] == [len(ids) for ids in out.token_ids]
