"""The models of a benchmark, built once and shared by all contenders, and the prompts of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.config import as_list
from specdec.decoder import SpeculativeDecoder
from specdec.decoding.provenance import hash_template
from specdec.errors import SpecdecError
from specdec.models.kv_cache import kv_dtype
from specdec.research.bench.config import Scenario
from specdec.research.models.choice import ModelChoice, facts, parameter_bytes
from specdec.research.prompts.choice import DataChoice
from specdec.research.prompts.datasets import Prompt, encode_texts, load_prompts


@dataclass
class Pair:
    """Target and draft on the device, tokenizer, and decoders of them. Contenders leave the models as they are.

    kv_cache_dtype: of every decoder; None = the models' dtype.
    """

    target: Any
    draft: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: str | None = None
    decoders: dict[Any, SpeculativeDecoder] = field(default_factory=dict)

    @staticmethod
    def build(choice: ModelChoice) -> Pair:
        """Raises SpecdecError for what cannot be loaded."""
        models = choice.load()
        target, draft = models.built()
        dtype = getattr(torch, models.dtype)
        return Pair(target, draft, models.tokenizer, models.device, dtype, choice.kv_cache_dtype)

    def decoder(self, compile: str, exact: Any) -> SpeculativeDecoder:
        """The decoder of these settings; contenders that differ in their strategies alone share it.

        Models are tested once, eagerly: each decoder's own self-test would compile passes that no run needs.
        """
        key = (compile, exact)
        if key not in self.decoders:
            if not self.decoders:
                SpeculativeDecoder(self.target, self.draft, self.tokenizer)
            options: dict[str, Any] = {"compile": compile, "exact": exact, "kv_cache_dtype": self.kv_cache_dtype}
            options["check"] = False
            self.decoders[key] = SpeculativeDecoder(self.target, self.draft, self.tokenizer, **options)
        return self.decoders[key]

    @property
    def ties_are_narrow(self) -> bool:
        """True if passes of different width differ too little to decide a text: float32, and caches in it."""
        return self.dtype == torch.float32 and kv_dtype(self.kv_cache_dtype) is None

    @property
    def eos(self) -> list[int]:
        """The ids that end a row."""
        return [int(t) for t in as_list(getattr(self.target.generation_config, "eos_token_id", None))]

    @property
    def weights(self) -> int:
        """Bytes of both models' parameters."""
        return parameter_bytes(self.target) + parameter_bytes(self.draft)

    def facts(self) -> dict[str, Any]:
        """Shapes, parameters and bytes of both models."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "target": facts(self.target), "draft": facts(self.draft)}


@dataclass(frozen=True)
class Item:
    """One call's prompts, as names and as ids. template: a hash of the chat template that they went through; None =
    through none."""

    ids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    template: str | None = None

    @property
    def longest(self) -> int:
        return max(len(p) for p in self.prompts)


def items(pair: Pair, data: DataChoice, scenario: Scenario) -> list[Item]:
    """The prompts of a scenario in calls of `batch` rows. Raises SpecdecError for too few prompts."""
    chosen = load_prompts(data.dataset, data.categories, scenario.prompts, data.seed)
    if len(chosen) < scenario.prompts:
        raise SpecdecError(f"data: {data.dataset} has {len(chosen)} of the {scenario.prompts} prompts asked for")
    if scenario.context is None:
        return calls_of(chosen, pair, scenario.batch, data.longest)
    rows = long_rows(chosen, load_prompts(data.dataset, data.categories), pair.tokenizer, scenario.context)
    return _grouped(chosen, rows, scenario.batch, None)


def calls_of(prompts: Sequence[Prompt], pair: Pair, batch: int, longest: int | None) -> list[Item]:
    """Prompts as calls of `batch` rows, through the chat template where there is one; longer texts are cut."""
    rows = encode_texts(prompts, pair.tokenizer, pair.target, longest)
    return _grouped(prompts, rows, batch, hash_template(pair.tokenizer))


def _grouped(prompts: Sequence[Prompt], rows: Sequence[Sequence[int]], batch: int, template: str | None) -> list[Item]:
    """Calls of rows, the longest first: the first call is the warm-up's, and what it allocates and compiles then
    serves the others."""
    named = [(prompt.id, tuple(row)) for prompt, row in zip(prompts, rows, strict=True)]
    named.sort(key=lambda entry: -len(entry[1]))
    groups = [named[i : i + batch] for i in range(0, len(named), batch)]
    return [Item(tuple(n for n, _ in group), tuple(r for _, r in group), template) for group in groups]


def long_rows(chosen: Sequence[Prompt], others: Sequence[Prompt], tokenizer: Any, length: int) -> list[list[int]]:
    """For every prompt, a row of `length` ids: other texts of the set, each prompt beginning elsewhere in it, and the
    prompt last. Raises SpecdecError for a set that is too short."""

    def encoded(prompt: Prompt) -> list[int]:
        return list(tokenizer(prompt.text + "\n\n", add_special_tokens=False)["input_ids"])

    rows = []
    for i, prompt in enumerate(chosen):
        start = i * len(others) // len(chosen)
        ids = encoded(prompt)
        for other in (*others[start:], *others[:start]):
            if len(ids) >= length:
                break
            ids = encoded(other) + ids if other.id != prompt.id else ids
        if len(ids) < length:
            raise SpecdecError(f"data: the prompts have {len(ids)} tokens together, fewer than the context of {length}")
        rows.append(ids[-length:])
    return rows


def sampled(generate: Mapping[str, Any]) -> bool:
    """Whether generation options sample tokens."""
    return float(generate.get("temperature", 0.0)) > 0
