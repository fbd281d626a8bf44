"""The models of an ablation: in which order pairs are loaded, and what stays in memory between them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from specdec.config import PairConfig
from specdec.decoder import SpeculativeDecoder
from specdec.research.ablation.config import Cell


def by_models(cells: Sequence[Cell]) -> list[tuple[PairConfig, list[Cell]]]:
    """Cells by the models that they load, those with one target one after the other, in the order of first mention."""
    targets = list(dict.fromkeys(_target(cell.models) for cell in cells))
    loads = list(dict.fromkeys(repr(cell.models) for cell in cells))
    order = sorted(cells, key=lambda c: (targets.index(_target(c.models)), loads.index(repr(c.models))))
    groups = [list(group) for _, group in groupby(order, key=lambda c: repr(c.models))]
    return [(group[0].models, group) for group in groups]


@dataclass
class Shelf:
    """Loaded models, so that none is loaded twice; those that no later pair needs are let go."""

    models: dict[str, Any] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)  # the same by what the config says of them

    def decoder(self, models: PairConfig, cells: Sequence[Cell]) -> SpeculativeDecoder:
        """The decoder of a pair. A chain that drafts through text decides whether vocabularies may differ."""
        options = {name: value for name, value in vars(models).items() if name not in ("target", "draft")}
        through_text = [list(c.strategies) for c in cells if any(s.get("translate") for s in c.strategies)]
        made: SpeculativeDecoder = SpeculativeDecoder.from_pretrained(
            models.target, models.draft, through_text[0] if through_text else [], shelf=self.models, **options
        )
        self.held[_target(models)] = made.target.model
        if made.draft is not None:
            self.held[_draft(models)] = made.draft.model
        return made

    def keep(self, later: Iterable[PairConfig]) -> None:
        """Let go of every model that none of these pairs needs."""
        needed = {name for models in later for name in (_target(models), _draft(models))}
        self.held = {name: model for name, model in self.held.items() if name in needed}
        kept = {id(model) for model in self.held.values()}
        gone = [key for key, model in self.models.items() if id(model) not in kept]
        for key in gone:
            del self.models[key]
        if gone:
            gc.collect()


def _target(models: PairConfig) -> str:
    """What the target is loaded from, and how."""
    return repr([(name, value) for name, value in vars(models).items() if not name.startswith("draft")])


def _draft(models: PairConfig) -> str:
    shared = ("device", "trust_remote_code")
    return repr([(name, v) for name, v in vars(models).items() if name.startswith("draft") or name in shared])
