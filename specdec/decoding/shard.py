"""A part of the prompts of a call or of the cells of an ablation, for processes that share the work."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from specdec.config import PairConfig
from specdec.errors import SpecdecError


@dataclass(frozen=True)
class Shard:
    """One of `count` parts."""

    index: int = 0
    count: int = 1

    @staticmethod
    def parse(text: str | None, option: str = "shard") -> Shard:
        """Read "0/4", the first of four; None = all of it. Raises SpecdecError, which names the option, for others."""
        if text is None:
            return Shard()
        numbers = re.fullmatch(r"(\d{1,9})/(\d{1,9})", str(text))
        shard = Shard(*map(int, numbers.groups())) if numbers else None
        if shard is None or shard.index >= shard.count:
            wanted = "index/count with index from 0 to count - 1, such as 0/4"
            raise SpecdecError(f"{option}: expected {wanted}, got {text!r}")
        return shard

    def has(self, index: int) -> bool:
        """True for what belongs to this part: everything `count` apart."""
        return index % self.count == self.index

    def place(self, models: PairConfig) -> PairConfig:
        """The pair on this shard's GPU, if the config leaves the device open: shards take the GPUs in turn."""
        if self.count == 1 or models.device is not None or not torch.cuda.is_available():
            return models
        return replace(models, device=f"cuda:{self.index % torch.cuda.device_count()}")
