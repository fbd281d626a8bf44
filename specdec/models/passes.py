"""A pass of a model as data: what is fixed in it, what goes in, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specdec.device.buffers import Buffers
from specdec.models.trees import TreePass

ALL_LAYERS = (-1,)  # of `PassKey.observed`


class PassKey(NamedTuple):
    """What is fixed in a pass: `batch` rows from `first_row` on, `width` columns, the K/V length that is read, how many
    columns of logits (0 = all), which hidden states are returned (`ALL_LAYERS` = all; None also says
    that nobody observes the pass), and the slots of a tree's
    region (0 = no tree), and the layers that are left out."""

    batch: int
    first_row: int
    width: int
    kv_len: int
    keep: int = 0
    observed: tuple[int, ...] | None = None
    region: int = 0
    skip: tuple[int, ...] = ()

    @property
    def passes(self) -> int:
        """Passes of the model in a program of this key."""
        return 1

    @property
    def is_prefill(self) -> bool:
        """Whether this is prefill: of the chunks of prompts few have the same key, unless calls repeat."""
        return self.keep > 0


@dataclass(frozen=True)
class PassInputs(Buffers):
    """What varies: tokens [B, S], layout [2, B] (where each row starts and how many of its tokens are real), and where
    the tokens stand in trees. All on the model's device."""

    tokens: Tensor
    layout: Tensor
    tree: TreePass | None = None


@dataclass(frozen=True)
class PassResult(Buffers):
    """logits [B, S', V]; hidden: states [B, S, H] of the observed layers, or None."""

    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None
