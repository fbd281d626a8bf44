"""A pass of a model as data: its key, inputs and result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specdec.device.buffers import Buffers
from specdec.models.trees import TreePass

ALL_LAYERS = (-1,)  # for `PassKey.observed`


class PassKey(NamedTuple):
    """What is fixed in a pass.

    batch, first_row: the rows that take part: `batch` of them, from `first_row` on
    width: columns, i.e. tokens fed to each row
    kv_len: slots of the cache that are read
    keep: logits of so many last columns are computed; 0 = all
    observed: layers whose hidden states are returned; None: none is observed
    region: slots of a tree; 0 = no tree
    skip: layers that are left out
    adapter: identity of the runner's adapter; 0 = none
    chosen: adapters of PEFT; None: as the model is set
    rare: a pass of this shape comes too seldom to be compiled
    """

    batch: int
    first_row: int
    width: int
    kv_len: int
    keep: int = 0
    observed: tuple[int, ...] | None = None
    region: int = 0
    skip: tuple[int, ...] = ()
    adapter: int = 0
    chosen: tuple[str, ...] | None = None
    rare: bool = False

    @property
    def is_prefill(self) -> bool:
        """True for prefill, whose keys rarely come again unless calls repeat."""
        return self.keep > 0


@dataclass(frozen=True)
class PassInputs(Buffers):
    """What varies in a pass; all on the model's device.

    tokens [B, S]: ids
    layout [2, B]: first slot of each row, and how many of its tokens are real
    tree: where the tokens are in trees; None: all rows hold chains
    states [B, S, H]: what the tokens have after the layers that the runner leaves out, its model's first; None: the
        runner leaves out others, or none
    """

    tokens: Tensor
    layout: Tensor
    tree: TreePass | None = None
    states: Tensor | None = None


@dataclass(frozen=True)
class PassResult(Buffers):
    """What a pass returns.

    logits [B, S', V]
    hidden [B, S, H]: states of each observed layer; None: none is observed
    """

    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None
