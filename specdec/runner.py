"""Runs a model over a ragged cache: prompt prefill, and passes of a few fixed widths.

A pass feeds up to S tokens to each row of the batch. Widths S come from a short list, and so do the K/V lengths that
attention reads, so that a later CUDA graph or compiled variant is captured once per shape and not once per call.
Shorter rows are padded: padding goes to the cache's trash slot and its logits are ignored.

In exact mode there is one width and one K/V length for the whole call; a token's logits are then computed by the
same kernels in the same order, whatever else is in the pass (design notes in docs/exactness.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.attention import AttentionSwitch, MaskBuilder, check_attention
from specdec.kv_cache import CachePool, RaggedCache, kv_widths
from specdec.trees import TreePass

# On a CPU every padded token costs its share of the weights' arithmetic, so narrow widths are all there; on a GPU a
# pass of 8 costs what a pass of 1 costs, and few shapes mean few graphs.
CPU_WIDTHS = (*range(1, 18), 24, 32, 48, 64, 128, 256, 512)
CUDA_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
EXACT_WIDTH = 8


@dataclass(frozen=True)
class Shapes:
    """The fixed shapes of one call.

    widths: allowed tokens a pass and row, ascending; verify_width: most tokens a verify pass feeds to a row (longer
    drafts go in chunks); kv_step: K/V lengths are rounded up to its multiples (tokens); kv_fixed: one K/V length for
    the whole call, or None.
    """

    widths: tuple[int, ...]
    verify_width: int
    kv_step: int
    kv_fixed: int | None = None

    @staticmethod
    def choose(device: torch.device, exact: bool, capacity: int) -> Shapes:
        if exact:
            return Shapes(tuple(sorted({EXACT_WIDTH, CUDA_WIDTHS[-1]})), EXACT_WIDTH, 1, capacity)
        if device.type == "cpu":
            return Shapes(CPU_WIDTHS, 17, 32)
        return Shapes(CUDA_WIDTHS, 16, 256)

    def width(self, tokens: int) -> int:
        """The narrowest allowed width for `tokens` tokens."""
        return next(w for w in self.widths if w >= tokens)

    def kv_len(self, tokens: int, capacity: int) -> int:
        if self.kv_fixed is not None:
            return self.kv_fixed
        return min(capacity, -(-tokens // self.kv_step) * self.kv_step)


@dataclass
class PassOutput:
    """What a pass gives, and what drafters that learn from the target see (`observe`).

    logits [B', S', V] in the model's dtype; tokens [B', S] as fed; row b of them is slot `first_row + b`, fed at the
    positions `starts[b]...`, `counts[b]` of them real; hidden: every layer's hidden states [B', S, H], the embedding's
    first, if they were asked for; tree: where the tokens really stand when rows of the pass hold trees.
    """

    logits: Tensor
    tokens: Tensor
    starts: Sequence[int]
    counts: Sequence[int]
    first_row: int = 0
    hidden: tuple[Tensor, ...] | None = None
    tree: TreePass | None = None


@dataclass
class Runner:
    """A model, its attention switch and its mask builder. Holds no state of any call: caches are passed in."""

    model: Any
    attn_implementation: str | None = None
    pool: CachePool = field(init=False)

    def __post_init__(self) -> None:
        self.config: Any = self.model.config.get_text_config()
        implementation = check_attention(self.attn_implementation)
        self.dtype: torch.dtype = self.model.dtype
        self.device: torch.device = self.model.get_input_embeddings().weight.device
        head = self.model.get_output_embeddings()
        self.embedded: int = self.model.get_input_embeddings().weight.shape[0]
        # Padded embeddings and heads can differ in rows; ids that only one of them has do not exist.
        self.vocab_size: int = self.embedded if head is None else min(self.embedded, head.weight.shape[0])
        self.context: int = context_length(self.config)
        self.switch = AttentionSwitch(self.model, implementation)
        self.masks = MaskBuilder(self.config, implementation, self.dtype)
        self.pool = CachePool(kv_widths(self.config)[0])
        accepted = inspect.signature(self.model.forward).parameters
        # transformers 5.24 renamed the argument; the old name still works there but warns.
        self.cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self.can_trim_logits = "logits_to_keep" in accepted

    def step(
        self,
        cache: RaggedCache,
        shapes: Shapes,
        tokens: Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        rows: slice | None = None,
        keep: int = 0,
        hidden: bool = False,
        tree: TreePass | None = None,
    ) -> PassOutput:
        """One pass. tokens [B, S] on the model's device, S an allowed width; row b feeds `counts[b]` of them at the
        positions `starts[b], starts[b] + 1, ...` (0 = the row takes no part), or where `tree` puts them. `rows` names
        the cache rows that the batch stands for (default all); `keep` > 0 computes logits of the last `keep` columns
        only.
        """
        batch, width = tokens.shape
        reach = max(s + (c if tree is None else tree.region) for s, c in zip(starts, counts, strict=True))
        kv_len = shapes.kv_len(reach, cache.capacity)
        layout = to_device([list(starts), list(counts)], self.device)  # [2, B]
        column = torch.arange(width, device=self.device)
        real = column < layout[1, :, None]  # [B, S]
        slots = layout[0, :, None] + (column if tree is None else tree.offsets)
        ahead = slots if tree is None else layout[0, :, None] + tree.depths.gather(1, tree.offsets)
        positions = torch.where(real, ahead, 0)
        cache.aim(torch.where(real, slots, cache.capacity), rows or slice(0, batch), kv_len)
        # Ids that the embedding lacks can only be padding ids of a wider partner's vocabulary; feeding another id
        # there costs acceptance, never correctness.
        tokens = tokens.clamp(max=self.embedded - 1)
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": self.masks(positions, kv_len, tree),
            self.cache_argument: cache,
            "use_cache": True,
        }
        if keep and self.can_trim_logits:
            arguments["logits_to_keep"] = keep
        if hidden:
            arguments["output_hidden_states"] = True
        with torch.no_grad(), self.switch.on():
            out = self.model(**arguments)
        first = rows.start if rows is not None else 0
        return PassOutput(out.logits, tokens, starts, counts, first, out.hidden_states if hidden else None, tree)

    def prefill(
        self,
        cache: RaggedCache,
        shapes: Shapes,
        row: int,
        tokens: Sequence[int],
        start: int,
        seen: Callable[[PassOutput], None] | None = None,
    ) -> None:
        """Write `tokens` of one row at positions `start...`, in chunks of the widest allowed width.

        The row runs alone (batch 1), so its cache does not depend on its neighbours. One column of logits a chunk is
        computed because models always compute some; it is not used. `seen` is called with every chunk's output, hidden
        states included.
        """
        widest = shapes.widths[-1]
        for offset in range(0, len(tokens), widest):
            chunk = list(tokens[offset : offset + widest])
            width = shapes.width(len(chunk))
            padded = to_device([chunk + [0] * (width - len(chunk))], self.device)
            rows = slice(row, row + 1)
            out = self.step(cache, shapes, padded, [start + offset], [len(chunk)], rows, 1, seen is not None)
            if seen is not None:
                seen(out)


def context_length(config: Any) -> int:
    """Positions the model was made for; a large number where the config states none."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 30


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A host list as a tensor on `device`, without making the host wait for the device."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def sync_allowed(device: torch.device) -> Iterator[None]:
    """Suspend `torch.cuda.set_sync_debug_mode`, with which a caller can prove that nothing else waits."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class HostReader:
    """The only way values come back from the device: counted, and one transfer a call.

    `count` is the number of transfers so far. Everything is packed into float64, which holds token ids, lengths and
    float32 values exactly.
    """

    def __init__(self) -> None:
        self.count = 0

    def read(self, *tensors: Tensor) -> list[Any]:
        """The tensors as nested lists of Python numbers, ints where the tensor was integral or boolean."""
        self.count += 1
        if not tensors:
            return []
        home = tensors[0].device
        with sync_allowed(home):
            flat = torch.cat([t.detach().to(home).reshape(-1).to(torch.float64) for t in tensors]).cpu()
        out, offset = [], 0
        for tensor in tensors:
            part = flat[offset : offset + tensor.numel()]
            offset += tensor.numel()
            if not tensor.is_floating_point():
                part = part.to(torch.int64)
            out.append(part.reshape(tensor.shape).tolist())
        return out
