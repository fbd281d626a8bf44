"""Checks that a user's logits processor is a function of (input_ids, scores), as far as that can be checked.

Under speculative decoding a processor is called on drafted prefixes that may be rejected, on several of one length,
and for the draft model as well as for the target. If its result depends on earlier calls, it changes the output's
distribution. Classes of transformers that are known to do so are refused by name. Others are tried out on copies at the
start of a call: the same call twice, and the same call after other calls, must give the same result, and repeating a
call must not change the object. State kept elsewhere (a closure, a global, torch's random generator) only shows in the
results, so the check is no proof.

A processor that changes its attributes but not its results - a logger, a timer - says so with `prefix_only = True`.
One whose state follows the text belongs into `specdec.sampling.constraints`.

transformers calls a processor with all rows at once, so that it may treat row i in its own way: by an index, or by
tensors with a row each. That is tried out too (`knows_its_row`), on the prompts and made-up texts after them;
`by_row = True` or `False` on the processor settles it. A processor never sees the texts of other rows, because each row
is decoded by itself: one that mixes rows mixes copies of one row.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor

from specdec.errors import SpecdecError
from specdec.sampling.constraints import PrefixProcessor
from specdec.sampling.processors import AllRows, knows_no_row

# Why each cannot see speculative prefixes; by name, because some exist in some versions only.
REFUSED = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model itself and keeps a cache of its calls",
    "ClassifierFreeGuidanceLogitsProcessor": "it needs a second, unconditional row for every row",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it needs a second, unconditional row for every row",
    "DiaEOSDelayPatternLogitsProcessor": "it remembers in which step a channel ended",
    "SynthIDTextWatermarkLogitsProcessor": "it counts its calls and remembers their contexts",
    "WhisperNoSpeechDetection": "it keeps the inputs and results of earlier calls",
}
_COMPARED = 1 << 16  # tensors of more numbers are compared by address and version
_PROVIDED = "transformers.generation.logits_process"
_HINT = "make it a function of (input_ids, scores), or give it a state that follows the text (specdec.constraints)"


def check_processors(processors: Sequence[Any], prompt: Sequence[int], vocab: int, device: torch.device) -> None:
    """Raise SpecdecError for a processor whose result visibly depends on more than its arguments."""
    for processor in processors:
        for kind in type(processor).__mro__:
            if kind.__name__ in REFUSED:
                raise SpecdecError(f"{kind.__name__} does not work with speculation: {REFUSED[kind.__name__]}")
        provided = type(processor).__module__ == _PROVIDED
        if not provided and not isinstance(processor, PrefixProcessor):
            _try_out(processor, prompt, vocab, device)


def _try_out(processor: Any, prompt: Sequence[int], vocab: int, device: torch.device) -> None:
    name = getattr(processor, "__name__", type(processor).__name__)
    ids = torch.tensor([list(prompt)], device=device)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, vocab, generator=generator).to(device)
    tried, other = _copy(processor), _copy(processor)
    first = _call(tried, ids, scores)
    before = _state(tried)
    second = _call(tried, ids, scores)
    if first is None or second is None:
        return
    if not _same(first, second):
        raise SpecdecError(f"logits_processor {name}: two calls with the same arguments differ; {_HINT}")
    if not getattr(processor, "prefix_only", False) and _differs(before, _state(tried)):
        raise SpecdecError(
            f"logits_processor {name}: a call changes its attributes; {_HINT}, or set prefix_only = True on it if "
            "its results do not depend on them"
        )
    for token in (0, 1, vocab - 1):
        branch = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
        after_others, alone = _call(tried, branch, scores), _call(_copy(other), branch, scores)
        if after_others is not None and alone is not None and not _same(after_others, alone):
            raise SpecdecError(f"logits_processor {name}: its result depends on earlier calls; {_HINT}")


_MADE_UP = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)  # tokens after a prompt, in trials
_MOST_NUMBERS = 1 << 26  # scores in all trials of one processor


def knows_its_row(
    processor: Any, prompts: Sequence[Sequence[int]], longest: int, vocab: int, device: torch.device
) -> bool:
    """True if a processor treats the rows of a call differently. prompts: of all rows; longest: most new tokens."""
    rows, said = len(prompts), getattr(processor, "by_row", None)
    beams = getattr(processor, "_num_beams", 1) if isinstance(processor, PrefixConstrainedLogitsProcessor) else 1
    if rows % beams:
        raise SpecdecError(f"{type(processor).__name__}: num_beams={beams} does not divide the {rows} rows of the call")
    if rows < 2 or knows_no_row(processor):
        return False
    if said is not None:
        return bool(said)
    tried = _copy(processor)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, vocab, generator=generator).to(device)
    for text in _texts(prompts, longest, vocab, generator)[: max(4, _MOST_NUMBERS // (rows * vocab))]:
        ids = text.to(device)[None]
        together = _call(tried, ids.expand(rows, -1), scores.expand(rows, -1))
        if together is None or together.shape != (rows, vocab):
            return False  # it does not take a batch, or not this text: the real call says why
        alone = _call(tried, ids, scores)
        if alone is None or alone.shape != (1, vocab) or not _close(together, together[:1]):
            _try_out(AllRows(processor, rows), prompts[0], vocab, device)
            return True
    return False


def _texts(prompts: Sequence[Sequence[int]], longest: int, vocab: int, generator: torch.Generator) -> list[Tensor]:
    """Make trial texts: a few prompts, and the first one with made-up tokens after it."""
    few = [torch.tensor(ids) for ids in dict.fromkeys(tuple(prompt) for prompt in prompts)][:3]
    more = torch.randint(vocab, (max(_MADE_UP),), generator=generator)
    return few + [torch.cat([few[0], more[:n]]) for n in _MADE_UP if n < longest]


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.float(), b.float().expand_as(a), rtol=1e-3, atol=1e-5, equal_nan=True)


def _call(processor: Any, ids: Tensor, scores: Tensor) -> Tensor | None:
    """Call a processor; None if it does not take a made-up text: the real call says why."""
    try:
        result = processor(ids.clone(), scores.clone())
    except Exception:
        return None
    return result if isinstance(result, Tensor) else None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a, nan=1e30), torch.nan_to_num(b, nan=1e30))


def _shared(value: Any) -> bool:
    """True for what is too large to copy, and what processors do not change."""
    return isinstance(value, torch.nn.Module) or hasattr(value, "convert_ids_to_tokens")


def _copy(processor: Any) -> Any:
    """Copy a processor and its state if possible; functions are returned unchanged."""
    if hasattr(processor, "__code__") or not hasattr(processor, "__dict__"):
        return processor
    try:
        made = copy.copy(processor)
        memo = {id(v): v for v in vars(processor).values() if _shared(v)}
        vars(made).update(copy.deepcopy(dict(vars(processor)), memo))
    except Exception:
        return processor
    return made


def _state(processor: Any) -> dict[str, Any]:
    """Return attributes as comparable values."""
    if hasattr(processor, "__code__"):
        return {}
    return {name: _frozen(value) for name, value in getattr(processor, "__dict__", {}).items() if not _shared(value)}


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        small = value.numel() <= _COMPARED
        return (tuple(value.shape), value.tolist() if small else (value.data_ptr(), value._version))
    if isinstance(value, torch.Generator):
        return ("generator", value.get_state().tolist())
    if isinstance(value, dict):
        return {repr(k): _frozen(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_frozen(v) for v in (sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)]
    if hasattr(value, "__dict__") and not callable(value):
        return (type(value).__name__, {k: _frozen(v) for k, v in vars(value).items() if v is not value})
    return value


def _differs(a: dict[str, Any], b: dict[str, Any]) -> bool:
    try:
        return bool(a != b)
    except Exception:  # values that cannot be compared say nothing
        return False
