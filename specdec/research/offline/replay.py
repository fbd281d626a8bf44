"""Replay of strategies on text that is already there: acceptance without any model.

Under greedy decoding (and under seeded `match` or `coupled` sampling) a model's text does not depend on the drafter:
in every round the longest common prefix of the draft and the text is what would have been accepted. A strategy that
looks at nothing but token ids can therefore be measured on kept texts, exactly and in milliseconds a text.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.drafters import make_drafters
from specdec.drafters.base import DraftContext, DraftRequest
from specdec.drafters.chain import Chain, build_chain
from specdec.drafters.costs import CostTable
from specdec.drafters.length import LengthController, unlimited
from specdec.errors import SpecdecError
from specdec.files.texts import first_line, read_bytes, unfinished
from specdec.models.kv_cache import common_prefix
from specdec.models.runner import Shapes
from specdec.stats import RoundRecord


@dataclass(frozen=True)
class Text:
    """A prompt and what a model wrote after it, as ids (int64)."""

    id: str
    category: str
    prompt: np.ndarray
    output: np.ndarray


def save_texts(
    path: Path,
    ids: Sequence[str],
    categories: Sequence[str],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
) -> None:
    """Write texts to a compressed .npz file: flat int32 arrays of ids, and how many belong to each text."""
    arrays: dict[str, Any] = {}
    for name, rows in (("prompts", prompts), ("outputs", outputs)):
        arrays[name] = np.array([t for row in rows for t in row], np.int32)
        arrays[f"{name}_sizes"] = np.array([len(row) for row in rows], np.int32)
    with unfinished(path, "file of texts") as file:
        np.savez_compressed(file, ids=np.array(ids), categories=np.array(categories), **arrays)


def load_texts(path: str | Path) -> list[Text]:
    """Read a file of `save_texts`. Raises SpecdecError for another file."""
    data = io.BytesIO(read_bytes(path, "file of texts"))
    try:
        with np.load(data, allow_pickle=False) as arrays:
            prompts, outputs = (_rows(arrays[name], arrays[f"{name}_sizes"]) for name in ("prompts", "outputs"))
            named = zip(arrays["ids"], arrays["categories"], prompts, outputs, strict=True)
            return [Text(str(i), str(c), prompt, output) for i, c, prompt, output in named]
    except Exception as error:  # numpy reads heads as Python code, which can fail in any way
        raise SpecdecError(f"{path} is not a file of texts: {first_line(error)}") from None


def _rows(ids: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Flat ids as rows of these sizes. Raises ValueError where they do not fit."""
    if ids.dtype.kind not in "iu" or sizes.dtype.kind not in "iu" or ids.ndim != 1 or sizes.ndim != 1:
        raise ValueError("ids and sizes must be flat arrays of whole numbers")
    if (sizes < 0).any() or int(sizes.sum()) != len(ids) or (ids < 0).any():
        raise ValueError(f"{len(ids)} ids do not fill rows of {int(sizes.sum())}, or one is negative")
    return np.split(ids.astype(np.int64), np.cumsum(sizes)[:-1]) if len(sizes) else []


def model_free_chain(strategies: Any, longest: int, costs: CostTable | None = None) -> Chain:
    """A fresh chain of strategies that read ids only, for texts of up to `longest` tokens; costs: with automatic
    length, as on a CPU."""
    drafters = make_drafters(strategies, has_draft=False)
    for drafter in drafters:
        if drafter.name in ("draft-model", "eagle3", "early-exit"):
            raise SpecdecError(f"strategy {drafter.name!r} needs a model: it cannot be replayed on ids")
    context = DraftContext(batch=1, capacity=longest, vocab_size=1 << 31, separate=True)
    if costs is None:
        return build_chain(drafters, context)
    shapes = Shapes.choose(torch.device("cpu"), False, longest)
    chain = build_chain([unlimited(d, shapes.verify_width - 1) for d in drafters], context)
    chain.lengths = LengthController(chain.drafters, [True] * len(drafters), costs, shapes, 1, free=True)
    return chain


def replay(chain: Chain, prompt: np.ndarray, output: np.ndarray, n_max: int = 0, row: int = 0) -> list[RoundRecord]:
    """The rounds of decoding `output` after `prompt` with this chain, as the engine would run them.

    chain: keeps its state, as within one call; n_max: most tokens a round drafts (<= 0: no limit but the text's end).
    A round emits its accepted tokens and one more, and the last one must not draft past the end.
    """
    ids = np.concatenate([prompt, output])
    size, records = len(prompt), []
    chain.begin(row, ids[: size - 1])
    while size < len(ids):
        room = len(ids) - size - 1
        limit = min(room, n_max) if n_max > 0 else room
        drafted: list[int] = []
        strategy = None
        if limit > 0:
            request = DraftRequest(row, ids[: size - 1], int(ids[size - 1]), limit, size - 1)
            [draft] = chain.draft([request])
            drafted, strategy = [int(t) for t in draft.tokens], draft.drafter or None
            if chain.can_pipeline:
                chain.plan([request])
        accepted = common_prefix(ids[size:], np.array(drafted, dtype=np.int64))
        chain.accept(row, accepted)
        records.append(RoundRecord(strategy, len(drafted), accepted))
        size += accepted + 1
    return records
