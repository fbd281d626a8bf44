"""The pair report: what matters about a target and a draft, from their configs and tokenizers alone.

Nothing is allocated to make it: parameters are counted on a model without storage, memory comes from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec.errors import SpecdecError
from specdec.models.checkpoint import said
from specdec.models.kinds import is_recurrent
from specdec.models.kv_cache import kv_cache_bytes
from specdec.models.runner import UNBOUNDED, context_length
from specdec.models.vocabulary import Vocabularies, handling

SIZE_RATIO_WARNING = 1 / 3
UNSTATED = 2048  # tokens of a row for a target that does not say how long a text may be


def draft_capacity(tokens: int) -> int:
    """Return the draft's cache size for rows of `tokens` target tokens: its vocabulary may need more for one text."""
    return 4 * tokens + 64


@dataclass(frozen=True)
class ModelFacts:
    """One model of a pair.

    parameters: how many numbers
    weight_bytes: bytes of the weights
    vocab_size: rows of the embedding
    context: longest text, in tokens
    """

    role: str
    name: str
    model_type: str
    parameters: int
    weight_bytes: int
    vocab_size: int
    context: int
    dtype: str
    device: str
    config: Any = field(repr=False, compare=False, default=None)

    @staticmethod
    def from_config(role: str, name: str, config: Any, dtype: torch.dtype | None, device: str) -> ModelFacts:
        """Count parameters on a model that has no storage."""
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # anything that transformers trips over in a configuration
            raise SpecdecError(f"{role} {name}: its config.json makes no model: {said(error)}") from None
        return ModelFacts._of(role, name, model, dtype or model.dtype, device)

    @staticmethod
    def from_module(role: str, model: Any) -> ModelFacts:
        return ModelFacts._of(role, type(model).__name__, model, model.dtype, str(model.device))

    @staticmethod
    def _of(role: str, name: str, model: Any, dtype: torch.dtype, device: str) -> ModelFacts:
        text, weights = model.config.get_text_config(), list(model.parameters())
        count, on_meta = sum(p.numel() for p in weights), any(p.is_meta for p in weights)
        stored = count * dtype.itemsize if on_meta else sum(p.numel() * p.element_size() for p in weights)
        named = str(dtype).removeprefix("torch.")
        sizes = count, stored, text.vocab_size, context_length(text)
        return ModelFacts(role, name, text.model_type, *sizes, named, device, text)

    @property
    def states_context(self) -> bool:
        """True if the configuration says how long a text may be."""
        return self.context < UNBOUNDED

    def kv_bytes(self, batch: int, tokens: int, kept_in: torch.dtype | None = None) -> int:
        """Count the bytes of the K/V cache for `batch` rows of `tokens` tokens, at most the context."""
        return kv_cache_bytes(self.config, kept_in or getattr(torch, self.dtype), batch, min(tokens, self.context))


@dataclass
class PairReport:
    """What matters about a pair.

    models: target, then draft
    vocabulary: identical | compatible | translated | unchecked | None (no draft)
    differing: ids of a compatible pair whose texts differ; the draft never proposes them
    size_ratio: the draft's parameters over the target's; None without a draft
    kept_in: the dtype of keys and values, if it is not the models'
    """

    models: list[ModelFacts]
    vocabulary: str | None = None
    differing: tuple[int, ...] = ()
    size_ratio: float | None = None
    kept_in: torch.dtype | None = None
    warnings: list[str] = field(default_factory=list)

    @staticmethod
    def make(models: Sequence[ModelFacts]) -> PairReport:
        report = PairReport(list(models))
        for model in models:
            if is_recurrent(model.config):
                report.warnings.append(f"the memory does not count the states of recurrent layers of the {model.role}")
        if len(models) == 2:
            target, draft = models
            report.size_ratio = draft.parameters / max(1, target.parameters)
            if report.size_ratio > SIZE_RATIO_WARNING:
                report.warnings.append(
                    f"the draft has {report.size_ratio:.2f} of the target's parameters: above 1 : 3 it rarely pays"
                )
            if draft.context < target.context:
                report.warnings.append(
                    f"the draft's context of {draft.context} tokens is shorter than the target's"
                    f"{f' {target.context}' if target.states_context else ''}: drafting stops there"
                )
        return report

    def compare(self, tokenizer: Any, draft_tokenizer: Any, translate: bool) -> None:
        """Compare two tokenizers; None: nothing to compare.

        translate: the draft is translated through text, so vocabularies may differ; else SpecdecError is raised
        """
        if tokenizer is None or draft_tokenizer is None:
            self.vocabulary = "unchecked"
            if len({m.vocab_size for m in self.models}) > 1:
                self.warnings.append("vocabulary sizes differ and there is no second tokenizer to compare with")
            return
        found = Vocabularies.compare(tokenizer, draft_tokenizer)
        if found.refusal is None:
            self.vocabulary, self.differing = found.kind, found.differing
            if self.differing:
                self.warnings.append(
                    f"{len(self.differing)} ids are not the same in target and draft, which never proposes them: "
                    f"{found.examples}"
                )
                self.warnings += [f"{part}: the target's counts" for part in handling(tokenizer, draft_tokenizer)]
            self.warnings += [
                f"{name.upper()} differs: id {a} in the target, id {b} in the draft; the target's counts"
                for name in ("bos", "eos")
                if (a := getattr(tokenizer, f"{name}_token_id")) != (b := getattr(draft_tokenizer, f"{name}_token_id"))
            ]
            return
        if not translate:
            raise SpecdecError(
                f"tokenizer mismatch between target and draft: {found.refusal}; a draft-model strategy with "
                "translate=True drafts through text instead"
            )
        self.vocabulary = "translated"

    def memory(self, batch: int = 1, tokens: int | None = None, width: int = 16) -> dict[str, int]:
        """Count the bytes needed, before anything is allocated.

        weights: of all models
        kv_cache: for `batch` rows of `row_tokens(tokens)` tokens, without the states of recurrent layers
        logits: of one verify pass of `width` columns, in the model's dtype, float32, and as p
        """
        target, tokens = self.models[0], self.row_tokens(tokens)
        item = getattr(torch, target.dtype).itemsize
        parts = {
            "weights": sum(m.weight_bytes for m in self.models),
            "kv_cache": sum(
                m.kv_bytes(batch, n, self.kept_in) for m, n in zip(self.models, self._cached(tokens), strict=True)
            ),
            "logits": batch * width * target.vocab_size * (item + 8),
        }
        return {**parts, "total": sum(parts.values())}

    def row_tokens(self, tokens: int | None) -> int:
        """Return the tokens of a row whose memory is counted: at most the target's context, which is the default."""
        context = self.models[0].context
        if tokens is None:
            return context if self.models[0].states_context else UNSTATED
        return min(tokens, context)

    def _cached(self, tokens: int) -> list[int]:
        """Return the tokens per row that each model's cache holds."""
        draft = draft_capacity(tokens) if self.vocabulary == "translated" else tokens
        return [tokens, draft][: len(self.models)]

    def to_dict(self, batch: int = 1, tokens: int | None = None) -> dict[str, Any]:
        """Return plain data, with the memory of `batch` rows of `tokens` tokens."""
        models = [{f.name: getattr(m, f.name) for f in fields(m) if f.name != "config"} for m in self.models]
        return {
            "models": models,
            "vocabulary": self.vocabulary,
            "differing_ids": list(self.differing),
            "size_ratio": self.size_ratio,
            "warnings": list(self.warnings),
            "memory": self.memory(batch, tokens),
        }
