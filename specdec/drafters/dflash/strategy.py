"""dflash: a whole block of tokens from one pass of a head that reads the target's states.

Source: DFlash, block diffusion for speculative decoding (z-lab, arXiv 2602.06036); head.py has the layout of its files.
The block's distributions depend on the text alone and not on one another's tokens: each token is sampled from its own
q, after the same processors as the target's, and the draft is lossless under every rule.

Cost: one pass of the head a round, whatever the length, and no host read. Rows, features and the cache are EAGLE's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.config import check_whole
from specdec.drafters.base import DraftRequest
from specdec.drafters.dflash.files import load_block_head
from specdec.drafters.dflash.head import BlockHead
from specdec.drafters.eagle3.chain_head import ChainHead
from specdec.drafters.eagle3.rows import HeadInputs, HeadRows
from specdec.errors import SpecdecError


class BlockRows(HeadRows):
    """Rows whose cache has an entry a feature. The block is written after them; the next features overwrite it."""

    head: BlockHead

    def kv_len(self, requests: Sequence[DraftRequest], drafted: int) -> int:
        return super().kv_len(requests, self.head.config.block_size)

    def passes_of(self, steps: int) -> int:
        return 1

    def first(self, inputs: HeadInputs, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
        """Run the block of every row. Returns the logits [B, V] of its first token, those of the others [B, S - 2, V],
        and how many entries each row has, int64 [B], 0 = no part in this."""
        starts, counts, none = inputs.starts, inputs.counts, self.cache.capacity
        held, rows = starts + counts, torch.arange(self.batch, device=self.device)
        columns = torch.arange(inputs.tokens.shape[1], device=self.device)
        entries = torch.where(columns < counts[:, None], starts[:, None] + columns, none)
        block = held[:, None] + torch.arange(self.head.config.block_size, device=self.device)
        slots = torch.cat([entries, torch.where(counts[:, None] > 0, block, none)], dim=1)
        self.cache.aim(slots, slice(0, self.batch), kv_len)
        # Every token of a block sees the features and the whole block.
        sees = torch.arange(kv_len, device=self.device) < (held + self.head.config.block_size)[:, None]
        mask = sees[:, None, None].expand(-1, 1, self.head.config.block_size, -1)
        newest = inputs.tokens[rows, (counts - 1).clamp(min=0)]
        positions = torch.where(slots < none, slots, 0)
        logits = self.head.block(newest, inputs.features, positions, mask, self.cache)
        assert logits is not None
        return logits[:, 0], logits[:, 1:], held

    def step(self, tokens: Tensor, features: Tensor, slots: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """Return the logits [B, V] of the block's next token, and those of the rest."""
        return features[:, 0], features[:, 1:]

    def _pass(self, rows: slice, ids: Tensor, features: Tensor, slots: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """Put features into the cache: nothing is drafted from them yet."""
        self.cache.aim(slots, rows, kv_len)
        self.head.block(None, features, torch.where(slots < self.cache.capacity, slots, 0), None, self.cache)
        return features, features


@dataclass
class DFlash(ChainHead):
    """Drafts a block from a DFlash head. Raises SpecdecError for bad parameters, and for a head that cannot be read.

    head: a folder as z-lab publishes it
    n_max: most tokens to propose; None = the whole block
    mask_token_id: of heads whose config.json does not have it
    """

    n_max: int | None = None  # type: ignore[assignment]
    mask_token_id: int | None = None
    name: str = field(init=False, default="dflash")

    likely_causes = (
        "Look at the head: was it trained for this target and chat template (z-lab's are for thinking turned off), and "
        "is mask_token_id the mask that it was trained with? docs/eagle.md says what is read of its files."
    )

    rows_type = BlockRows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is None:
            raise SpecdecError("dflash: no head was given; pass head=FOLDER (config.json and weights)")
        self._head = self.head if isinstance(self.head, BlockHead) else load_block_head(self.head, self.mask_token_id)
        block = self._drafted_slots
        self.n_max = block - 1 if self.n_max is None else self.n_max
        check_whole("dflash: n_max", self.n_max, 1)
        if self.n_max >= block:
            raise SpecdecError(f"dflash: n_max={self.n_max}, and the head drafts at most {block - 1} tokens at once")

    @classmethod
    def without_effect(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        return {"mask_token_id": "a BlockHead has its own"} if isinstance(options.get("head"), BlockHead) else {}

    def steps(self, k: int) -> int:
        return 1

    @property
    def _drafted_slots(self) -> int:
        return int(self._head.config.block_size)  # type: ignore[attr-defined]
