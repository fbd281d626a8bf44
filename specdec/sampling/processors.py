"""Processors that read the text, applied to every verified position at once, each on exactly its own prefix.

A row's processors are transformers' own objects, in transformers' order. Those in `VECTORISED` run on the whole
[B, S, V] without a loop over positions and without a read from the device. `PrefixStates` (sampling/constraints.py)
follow the text token by token. Every other processor is called once per position, with ids [1, n] and scores [1, V]; if
it treats the rows of its batch differently, with all rows of the call (`AllRows`), as in transformers' `generate()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from specdec.device.transfer import sent, sync_allowed, to_device
from specdec.errors import SpecdecError
from specdec.sampling.constraints import PrefixProcessor, PrefixStates
from specdec.sampling.prefixes import History, Prefixes


class RowProcessors(list[Any]):
    """One row's processors: transformers' processors, callables, and `PrefixStates`."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Move on by emitted `tokens`, and forget other continuations."""
        for processor in self:
            if isinstance(processor, PrefixStates):
                processor.commit(tokens)


class AllRows:
    """A user's processor that treats rows differently. It is called with as many rows as the call has, each a copy of
    the row at hand, and the result at that row's index counts."""

    def __init__(self, processor: Any, rows: int, row: int = 0):
        self.processor, self.rows, self.row = processor, rows, row
        self.__name__ = getattr(processor, "__name__", type(processor).__name__)

    def of(self, row: int) -> AllRows:
        """Return the same for another row."""
        return AllRows(self.processor, self.rows, row)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        """Process scores [1, V] after ids [1, n] -> [1, V]."""
        ids, many = input_ids.expand(self.rows, -1).clone(), scores.expand(self.rows, -1).clone()
        returned = self.processor(ids, many)
        fits = isinstance(returned, Tensor) and returned.shape == many.shape
        return returned[self.row : self.row + 1] if fits else returned


def knows_no_row(processor: Any) -> bool:
    """True if a processor is known to treat each row of a batch alike and by itself."""
    # For a constraint by prefixes `build_sampling` makes states for each row, which are told its number.
    known = type(processor) in VECTORISED or type(processor) is hf.PrefixConstrainedLogitsProcessor
    return (known and _known_form(processor)) or isinstance(processor, PrefixProcessor)


def apply_processors(scores: Tensor, history: History) -> Tensor:
    """Apply every row's processors to scores [B, S, V] float32, which are overwritten or replaced."""
    active = history.active()
    if not active:
        return scores
    prefixes = Prefixes(history, scores.shape[1], scores.device)
    order = history.processors[active[0]]
    assert order is not None
    taking_part: list[Any] = [None] * prefixes.rows
    for b in active:
        taking_part[b] = history.processors[b]
    for i, first in enumerate(order):
        rows = [None if processors is None else processors[i] for processors in taking_part]
        stage = VECTORISED.get(type(first))
        if stage is not None and _known_form(first):
            scores = stage(rows, scores, prefixes)
        elif isinstance(first, PrefixStates):
            scores = _with_states(rows, scores, prefixes)
        else:
            scores = _one_by_one(rows, scores, prefixes)
    return scores


def _known_form(processor: Any) -> bool:
    """True if the vectorised form covers this object: not a repetition penalty that ignores a padded prompt."""
    return not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)


def _one_by_one(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    """Call processors that may do anything as transformers does: with ids [1, n] and scores [1, V]."""
    out = scores.clone()
    for b, processor in enumerate(rows):
        for s in range(prefixes.history.counts[b] if processor is not None else 0):
            out[b, s] = _called(processor, prefixes.prefix(b, s)[None], scores[b, s][None].clone())[0]
    return out


def _called(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    """Call a processor. Raises SpecdecError if it fails, with its own error as the cause."""
    name = getattr(processor, "__name__", type(processor).__name__)
    try:
        returned = processor(ids, scores)
    except SpecdecError:
        raise
    except Exception as error:
        raise SpecdecError(f"the logits processor {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(returned, Tensor) or returned.shape != scores.shape:
        shape = tuple(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
        raise SpecdecError(f"the logits processor {name} returned {shape}, expected scores of {tuple(scores.shape)}")
    return returned


def _with_states(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    """Apply processors whose state follows the text. They need the fed tokens on the host: one read."""
    history = prefixes.history
    with sync_allowed(history.fed.device):
        fed = history.fed.tolist()
    masks, where, out = [], [], scores
    for b, states in enumerate(rows):
        if states is None:
            continue
        known = history.known[b]
        assert known is not None
        newer = known[states.size :].tolist() if len(known) > states.size else []  # while drafting
        skip = max(0, states.size - len(known))
        for s in range(history.counts[b]):
            node = states.at(newer + [fed[b][c] for c in history.path(b, s)][skip:])
            if node is None:
                continue
            mask = states.mask(node, scores.shape[-1])
            if mask is None:
                out = scores.clone() if out is scores else out
                out[b, s] = states.process(node, scores[b, s].clone())
            else:
                masks.append(mask)
                where.append(b * scores.shape[1] + s)
    if not masks:
        return out
    flat = out.reshape(-1, scores.shape[-1])
    at, allowed = to_device(where, scores.device), sent(torch.stack(masks), scores.device)
    masked = flat[at].masked_fill(~allowed, -math.inf)
    nothing_left = masked.amax(dim=-1, keepdim=True) == -math.inf
    return flat.index_copy(0, at, masked.masked_fill(nothing_left & allowed, 0.0)).reshape(scores.shape)


# -- vectorised forms of transformers' processors: (row -> processor or None, scores, prefixes) -> scores --------------


def _any(rows: Sequence[Any]) -> Any:
    return next(p for p in rows if p is not None)


def _ids(values: Any, vocab: int, device: torch.device) -> Tensor:
    """Make a mask of token ids, bool [V]."""
    ids = values.to(device) if isinstance(values, Tensor) else torch.as_tensor(values, device=device)
    return torch.isin(torch.arange(vocab, device=device), ids)


def _text_free(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    """Apply processors that look at scores only, to all positions as one batch."""
    flat = scores.reshape(-1, scores.shape[-1])
    no_text = torch.empty((len(flat), 0), dtype=torch.int64, device=flat.device)
    return _any(rows)(no_text, flat).reshape(scores.shape)


def _suppress(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    return scores.masked_fill_(_ids(_any(rows).suppress_tokens, scores.shape[-1], scores.device), -math.inf)


def _biases(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    """Add sequence biases (bad words: -inf) to the last id of each sequence whose other ids are the newest.

    They are summed in transformers' order, shorter sequences first, at the ids that can get one.
    """
    by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {1: []}
    for sequence, bias in _any(rows).sequence_bias.items():
        if sequence:
            by_length.setdefault(len(sequence), []).append((sequence, bias))
    ids = sorted({sequence[-1] for group in by_length.values() for sequence, _ in group})
    total = scores.new_zeros((*scores.shape[:-1], len(ids)))
    for length, group in by_length.items():
        last = to_device([ids.index(sequence[-1]) for sequence, _ in group], scores.device)
        values = to_device([bias for _, bias in group], scores.device, torch.float32)
        if length > 1:
            before = to_device([sequence[:-1] for sequence, _ in group], scores.device)  # [G, length - 1]
            matches = (prefixes.tail(length - 1)[:, :, None] == before).all(dim=-1)
            values = torch.where(matches, values, 0.0)
        total.index_add_(-1, last, values.expand(*scores.shape[:-1], -1))
    at = to_device(ids, scores.device)
    return scores.index_copy_(-1, at, scores.index_select(-1, at) + total)


def _repetition(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    """Divide scores of ids in the prefix by the penalty if positive, else multiply."""
    penalty = _any(rows).penalty
    start = getattr(_any(rows), "prompt_ignore_length", None) or 0
    ids, counts = prefixes.occurrences(scores.shape[-1], [start] * prefixes.rows)
    index = ids[:, None].expand(-1, scores.shape[1], -1)
    old = scores.gather(-1, index)
    new = torch.where(old < 0, old * penalty, old / penalty)
    return scores.scatter_(-1, index, torch.where(counts > 0, new, old))


class PresenceFrequencyPenalty(hf.LogitsProcessor):
    """score - frequency * count - presence * (count > 0), count = how often the id occurs among the *generated* ids.

    OpenAI's definition; the prompt does not count, as in vLLM. Also works as a transformers processor.

    presence, frequency: penalties, usually in [-2, 2]
    prompt_length: ids of the prompt
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int):
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process scores [B, V] after ids [B, n] -> [B, V]."""
        ids = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, ids, torch.ones_like(ids, dtype=scores.dtype))
        return self.penalised(scores, counts)

    def penalised(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Subtract the penalties; counts: how often each id of scores was generated, shaped alike."""
        return scores - self.frequency * counts - self.presence * (counts > 0).to(scores.dtype)


def _presence_frequency(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    start = [(p or _any(rows)).prompt_length for p in rows]
    ids, counts = prefixes.occurrences(scores.shape[-1], start)
    index = ids[:, None].expand(-1, scores.shape[1], -1)
    return scores.scatter_(-1, index, _any(rows).penalised(scores.gather(-1, index), counts))


def _no_repeat_ngram(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    """Forbid ids that would repeat an n-gram, one of the known ids or one that ends at a fed token of the prefix."""
    n, vocab = _any(rows).ngram_size, scores.shape[-1]
    newest = prefixes.tail(n - 1)  # [B, S, n - 1]
    ending = prefixes.tail(n)[:, : prefixes.fed.shape[1]]  # [B, F, n]
    again = (ending[:, None, :, :-1] == newest[:, :, None]).all(dim=-1) & prefixes.on_path  # [B, S, F]
    last = ending[:, :, -1][:, None].expand_as(again)
    if prefixes.known.shape[1] >= n:
        grams = prefixes.known.unfold(1, n, 1)  # [B, N - n + 1, n]
        old = (grams[:, None, :, :-1] == newest[:, :, None]).all(dim=-1)
        again = torch.cat([again, old], dim=-1)
        last = torch.cat([last, grams[:, :, -1][:, None].expand_as(old)], dim=-1)
    inside = again & (last >= 0) & (last < vocab)
    least = torch.where(inside, -math.inf, math.inf)
    return scores.scatter_reduce_(-1, torch.where(inside, last, 0), least, "amin")


def _min_tokens(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    """Forbid the end of text before the prefix has its least length."""

    def early(p: Any, n: int) -> bool:
        return bool(n < (p.min_length if isinstance(p, hf.MinLengthLogitsProcessor) else _least(p)))

    return _forbid(_any(rows).eos_token_id, early, rows, scores, prefixes)


def _least(p: Any) -> int:
    return int(p.prompt_length_to_skip + p.min_new_tokens)


def _begin_suppress(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    return _forbid(_any(rows).begin_suppress_tokens, lambda p, n: n == p.begin_index, rows, scores, prefixes)


def _forbid(
    ids: Any, condition: Callable[[Any, int], bool], rows: Sequence[Any], scores: Tensor, prefixes: Prefixes
) -> Tensor:
    where = prefixes.where(condition, rows)
    if where is None:
        return scores
    return scores.masked_fill_(where & _ids(ids, scores.shape[-1], scores.device), -math.inf)


def _forced_bos(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    return _force(_any(rows).bos_token_id, lambda p, n: n == 1, rows, scores, prefixes)


def _forced_eos(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    return _force(_any(rows).eos_token_id, lambda p, n: n == p.max_length - 1, rows, scores, prefixes)


def _force(
    ids: Any, condition: Callable[[Any, int], bool], rows: Sequence[Any], scores: Tensor, prefixes: Prefixes
) -> Tensor:
    where = prefixes.where(condition, rows)
    if where is None:
        return scores
    chosen = _ids(ids, scores.shape[-1], scores.device)
    return scores.masked_fill_(where & ~chosen, -math.inf).masked_fill_(where & chosen, 0.0)


def _decay(rows: Sequence[Any], scores: Tensor, prefixes: Prefixes) -> Tensor:
    """Add |score| * (factor ** (tokens past the start) - 1) to the end of text."""

    def gain(p: Any, n: int) -> float:
        if not p or n <= p.regulation_start:
            return 0.0
        try:
            return float(pow(p.regulation_factor, n - p.regulation_start)) - 1
        except OverflowError:
            past = f"{p.regulation_factor!r} to the power of {n - p.regulation_start}"
            raise SpecdecError(f"exponential_decay_length_penalty: {past} is too large") from None

    gains = [[gain(p, n) for n in lengths] for p, lengths in zip(rows, prefixes.lengths, strict=True)]
    if not any(map(any, gains)):
        return scores
    eos = _any(rows).eos_token_id.to(scores.device)
    old = scores[..., eos]
    added = old.abs() * to_device(gains, scores.device, torch.float32)[..., None]
    return scores.index_copy_(-1, eos, old + added.masked_fill(~old.isfinite(), 0.0))


Stage = Callable[[Sequence[Any], Tensor, Prefixes], Tensor]
TEXT_FREE = (
    hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization,
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper, hf.EpsilonLogitsWarper, hf.EtaLogitsWarper,
)  # fmt: skip
VECTORISED: dict[type, Stage] = {
    **dict.fromkeys(TEXT_FREE, _text_free),
    hf.SuppressTokensLogitsProcessor: _suppress,
    hf.SequenceBiasLogitsProcessor: _biases,
    hf.NoBadWordsLogitsProcessor: _biases,
    hf.RepetitionPenaltyLogitsProcessor: _repetition,
    PresenceFrequencyPenalty: _presence_frequency,
    hf.NoRepeatNGramLogitsProcessor: _no_repeat_ngram,
    hf.MinLengthLogitsProcessor: _min_tokens,
    hf.MinNewTokensLengthLogitsProcessor: _min_tokens,
    hf.SuppressTokensAtBeginLogitsProcessor: _begin_suppress,
    hf.ForcedBOSTokenLogitsProcessor: _forced_bos,
    hf.ForcedEOSTokenLogitsProcessor: _forced_eos,
    hf.ExponentialDecayLengthPenalty: _decay,
}
