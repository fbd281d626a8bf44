"""transformers' `generate`: eager, static cache with compilation, assisted generation, prompt lookup."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from specdec.errors import SpecdecError
from specdec.research.bench.contenders.base import Contender, Output, until_end
from specdec.research.bench.pair import sampled

RECOMPILE_LIMIT = 256


@dataclass(frozen=True)
class Options:
    """How transformers decodes.

    cache: None = its own, "static" = a static one that `generate` makes, "kept" = one that is kept from call to call.
    compile: False forbids compilation, which transformers does by itself for a static cache on a GPU.
    assistant: the draft assists; assistant_tokens, _schedule, _confidence: of it, None = transformers' defaults.
    lookup: tokens that a prompt lookup proposes.
    generate: options of `generate`.
    """

    cache: str | None = None
    compile: bool = True
    assistant: bool = False
    assistant_tokens: int | None = None
    assistant_schedule: str | None = None
    assistant_confidence: float | None = None
    lookup: int | None = None
    generate: Mapping[str, Any] = field(default_factory=dict)


class Transformers(Contender):
    """One way of calling `generate` of the target."""

    kind = "transformers"
    options_class = Options
    _kept: Any = None

    def __init__(self, name: str, options: Mapping[str, Any]):
        super().__init__(name, options)
        if self.options.cache not in (None, "static", "kept"):
            raise SpecdecError(f"contender {name}: cache must be static, kept or null, got {self.options.cache!r}")
        if self.options.assistant and self.options.lookup is not None:
            raise SpecdecError(f"contender {name}: assistant and lookup: transformers takes one of them")
        unused = [n for n, value in vars(self.options).items() if n.startswith("assistant_") and value is not None]
        if unused and not self.options.assistant:
            raise SpecdecError(f"contender {name}: {unused[0]} has no effect without assistant: true")

    def version(self) -> str | None:
        return transformers.__version__

    def refuses(self, batch: int) -> str | None:
        assisted = self.options.assistant or self.options.lookup is not None
        return "transformers assists one row at a time" if assisted and batch > 1 else None

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, ignore_eos: bool) -> Output:
        ids, mask = left_padded(prompts, self.pair.device)
        eos = [] if ignore_eos else self.pair.eos
        with torch.no_grad(), self._assistant() as extra, torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            options = {"max_new_tokens": max_new_tokens, "eos_token_id": eos or None, "pad_token_id": 0, **extra}
            options |= {"attention_mask": mask, "do_sample": sampled(self.options.generate), **self.options.generate}
            out = self.pair.target.generate(ids, **options, **self._cache(len(prompts), ids.shape[1], max_new_tokens))
        rows = out[:, ids.shape[1] :].tolist()
        wanted = self.options.cache is not None and self.options.compile
        compiled = wanted and getattr(self.pair.target, "_compiled_call", None) is not None
        # Whether transformers compiled is its own choice; a baseline must say it.
        report = {"target": {"mode": "compiled" if compiled else "eager", "captured": 0}}
        return Output([until_end(row, eos) for row in rows], {"compile": report})

    def _cache(self, batch: int, prompt: int, new: int) -> dict[str, Any]:
        if self.options.cache is None:
            return {}
        compiled = {"disable_compile": not self.options.compile}
        if self.options.cache == "static":
            return {"cache_implementation": "static", **compiled}
        config, needed = self.pair.target.config, prompt + new
        if self._kept is None or self._kept[:2] != (batch, max(needed, self._kept[1])):
            self._kept = (batch, needed, transformers.StaticCache(config=config, max_cache_len=needed))
        self._kept[2].reset()
        accepted = inspect.signature(self.pair.target.forward).parameters
        return {"cache" if "cache" in accepted else "past_key_values": self._kept[2], **compiled}

    @contextmanager
    def _assistant(self) -> Iterator[dict[str, Any]]:
        """The options of assisted generation, which live in the assistant: set for the call."""
        if self.options.lookup is not None:
            yield {"prompt_lookup_num_tokens": self.options.lookup}
            return
        if not self.options.assistant:
            yield {}
            return
        config = self.pair.draft.generation_config
        wanted = {
            "num_assistant_tokens": self.options.assistant_tokens,
            "num_assistant_tokens_schedule": self.options.assistant_schedule,
            "assistant_confidence_threshold": self.options.assistant_confidence,
        }
        before = {name: getattr(config, name, None) for name in wanted}
        config.update(**{name: value for name, value in wanted.items() if value is not None})
        try:
            yield {"assistant_model": self.pair.draft}
        finally:
            config.update(**before)


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), [B, S] each, rows ending at the right."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
