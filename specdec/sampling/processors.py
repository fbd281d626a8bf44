"""Processors that read the text, applied to every verified position at once, each on exactly its own prefix.

A row's processors are transformers' own objects, in transformers' order. A call has a `Stage` for each. Those in
`VECTORISED` run on the whole [B, S, V] by tensor operations on the device alone, so that they are part of recorded
functions. The others are called on the host: `PrefixStates` (sampling/constraints.py) follow the text token by token;
every other processor is called once per position, with ids [1, n] and scores [1, V]; if it treats the rows of its batch
differently, with all rows of the call (`AllRows`), as in transformers' `generate()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from specdec.device.transfer import moved, sent, sync_allowed, to_device
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


def apply_processors(scores: Tensor, texts: Texts) -> Tensor:
    """Apply the stages of a call to scores [B, S, V] float32, which are overwritten or replaced."""
    tensors = iter(texts.constants)
    for i, stage in enumerate(texts.stages):
        if stage.form is not None:
            own = [next(tensors) for _ in range(stage.size)]
            scores = stage.form.apply(scores, Given(texts.prefixes, texts.numbers[:, i, None], stage.fixed, own))
            continue
        history = texts.history
        assert history is not None
        rows = [None if processors is None else processors[i] for processors in history.processors]
        on_host = _with_states if isinstance(stage.processor, PrefixStates) else _one_by_one
        scores = on_host(rows, scores, history)
    return scores


def _known_form(processor: Any) -> bool:
    """True if the vectorised form covers this object: not a repetition penalty that ignores a padded prompt."""
    return not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)


def _one_by_one(rows: Sequence[Any], scores: Tensor, history: History) -> Tensor:
    """Call processors that may do anything as transformers does: with ids [1, n] and scores [1, V]."""
    out = scores.clone()
    for b, processor in enumerate(rows):
        for s in range(history.counts[b] if processor is not None else 0):
            prefix = moved(history.prefix(b, s), scores.device)
            out[b, s] = _called(processor, prefix[None], scores[b, s][None].clone())[0]
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


def _with_states(rows: Sequence[Any], scores: Tensor, history: History) -> Tensor:
    """Apply processors whose state follows the text. They need the fed tokens on the host: one read."""
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


# -- vectorised forms of transformers' processors ----------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """What processors are prepared for: rows of a batch, tokens of the longest prefix, ids of the vocabulary."""

    rows: int
    longest: int
    vocab: int
    device: torch.device

    def ids(self, values: Any) -> Tensor:
        """Send ids of the vocabulary, int64 [n]; others are left out."""
        listed = torch.as_tensor(values).reshape(-1).tolist()
        return to_device([int(t) for t in listed if 0 <= t < self.vocab], self.device)


class Given(NamedTuple):
    """What a vectorised form looks at.

    number [B, 1]: what differs from row to row
    fixed: plain values, the same for all rows of a call and part of a recorded function's key
    constants: tensors that stay as they are, but are among its inputs
    """

    prefixes: Prefixes
    number: Tensor
    fixed: tuple[Any, ...]
    constants: Sequence[Tensor]


class Form(NamedTuple):
    """The vectorised form of a processor.

    apply: computes scores from scores, by operations on the device alone
    prepare: (processor, room) -> `Given.fixed` and `Given.constants`
    number: processor -> `Given.number`
    """

    apply: Callable[[Tensor, Given], Tensor]
    prepare: Callable[[Any, Room], tuple[tuple[Any, ...], tuple[Tensor, ...]]]
    number: Callable[[Any], int] = lambda p: 0


@dataclass(frozen=True)
class Stage:
    """One of a call's processors; `processor` is the first row's.

    form: None: it is called on the host
    fixed, size: as `Form.prepare` gave them, and how many tensors there were
    """

    processor: Any
    form: Form | None = None
    fixed: tuple[Any, ...] = ()
    size: int = 0

    @staticmethod
    def of(processor: Any, room: Room) -> tuple[Stage, tuple[Tensor, ...]]:
        """Prepare a processor; returns its stage, and the stage's tensors."""
        form = VECTORISED.get(type(processor))
        if form is None or not _known_form(processor):
            return Stage(processor), ()
        fixed, tensors = form.prepare(processor, room)
        return Stage(processor, form, fixed, len(tensors)), tensors

    @cached_property
    def signature(self) -> tuple[Any, ...] | None:
        """Equal for stages that compute the same from equal tensors; None if that cannot be told."""
        if self.form is None:
            return None
        named = [plain_settings(value) if callable(value) else value for value in self.fixed]
        return None if None in named else (self.form.apply, *named)


def plain_settings(processor: Any) -> tuple[Any, ...] | None:
    """Return type and attributes of a processor that has nothing but plain values, else None."""
    values = tuple(sorted(vars(processor).items()))
    plain = all(value is None or isinstance(value, (bool, int, float, str)) for _, value in values)
    return (type(processor), values) if plain else None


@dataclass
class Texts:
    """What a call's stages read in one pass.

    stages: of all rows
    prefixes: of the pass
    numbers [B, P]: what differs from row to row, by stage
    constants: tensors of all stages that run on the device, one after the other
    history: for stages that are called on the host
    """

    stages: Sequence[Stage]
    prefixes: Prefixes
    numbers: Tensor
    constants: Sequence[Tensor]
    history: History | None = None


def _text_free(scores: Tensor, given: Given) -> Tensor:
    """Apply processors that look at scores only, to all positions as one batch."""
    flat = scores.reshape(-1, scores.shape[-1])
    no_text = torch.empty((len(flat), 0), dtype=torch.int64, device=flat.device)
    processed: Tensor = given.fixed[0](no_text, flat)
    return processed.reshape(scores.shape)


def _suppress(scores: Tensor, given: Given) -> Tensor:
    return scores.index_fill_(-1, given.constants[0], -math.inf)


def _prepare_biases(p: Any, room: Room) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Fixed: how long the sequences of a group are, shorter ones first. Tensors: the ids that can get a bias, and for
    each group the place among them of each sequence's last id, the biases, and the other ids [G, length - 1]."""
    groups: dict[int, list[tuple[tuple[int, ...], float]]] = {1: []}
    for sequence, bias in p.sequence_bias.items():
        if sequence:
            groups.setdefault(len(sequence), []).append((sequence, bias))
    ids = sorted({sequence[-1] for group in groups.values() for sequence, _ in group})
    tensors = [to_device(ids, room.device)]
    for length, group in groups.items():
        tensors.append(to_device([ids.index(sequence[-1]) for sequence, _ in group], room.device))
        tensors.append(to_device([bias for _, bias in group], room.device, torch.float32))
        before = np.array([sequence[:-1] for sequence, _ in group]).reshape(len(group), length - 1)
        tensors.append(to_device(before, room.device))
    return tuple(groups), tuple(tensors)


def _biases(scores: Tensor, given: Given) -> Tensor:
    """Add sequence biases (bad words: -inf) to the last id of each sequence whose other ids are the newest.

    They are summed in transformers' order, shorter sequences first, at the ids that can get one.
    """
    at, *rest = given.constants
    total = scores.new_zeros((*scores.shape[:-1], len(at)))
    for i, length in enumerate(given.fixed):
        last, values, before = rest[3 * i : 3 * i + 3]
        if length > 1:
            matches = (given.prefixes.tail(length - 1)[:, :, None] == before).all(dim=-1)
            values = torch.where(matches, values, 0.0)
        total.index_add_(-1, last, values.expand(*scores.shape[:-1], -1))
    return scores.index_copy_(-1, at, scores.index_select(-1, at) + total)


def _repetition(scores: Tensor, given: Given) -> Tensor:
    """Divide scores of ids in the prefix, from position `number` on, by the penalty if positive, else multiply."""
    ids, counts = given.prefixes.occurrences(scores.shape[-1], given.number)
    index = ids[:, None].expand(-1, scores.shape[1], -1)
    old = scores.gather(-1, index)
    new = torch.where(old < 0, old * given.fixed[0], old / given.fixed[0])
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
        return _penalised(scores, counts, self.presence, self.frequency)


def _penalised(scores: Tensor, counts: Tensor, presence: float, frequency: float) -> Tensor:
    """Subtract the penalties; counts: how often each id of scores was generated, shaped alike."""
    return scores - frequency * counts - presence * (counts > 0).to(scores.dtype)


def _presence_frequency(scores: Tensor, given: Given) -> Tensor:
    ids, counts = given.prefixes.occurrences(scores.shape[-1], given.number)
    index = ids[:, None].expand(-1, scores.shape[1], -1)
    return scores.scatter_(-1, index, _penalised(scores.gather(-1, index), counts, *given.fixed))


def _no_repeat_ngram(scores: Tensor, given: Given) -> Tensor:
    """Forbid ids that would repeat an n-gram, one of the known ids or one that ends at a fed token of the prefix."""
    n, vocab, width = given.fixed[0], scores.shape[-1], given.prefixes.fed.shape[1]
    if n > given.prefixes.known.shape[1] + width:  # no text has so many ids
        return scores
    newest = given.prefixes.tail(n - 1)  # [B, S, n - 1]
    found = []  # n-grams, [B, S or 1, G, n]
    if given.prefixes.known.shape[1] >= n:
        found.append(given.prefixes.known.unfold(1, n, 1)[:, None])
    if width:  # the n-grams that end at one of the newest tokens: all that are fed, and perhaps known ones once more
        found.append(given.prefixes.tail(width + n - 1).unfold(-1, n, 1))
    for grams in found:
        again = (grams[..., :-1] == newest[:, :, None]).all(dim=-1)
        last = grams[..., -1].expand_as(again)
        inside = again & (last >= 0) & (last < vocab)
        least = torch.where(inside, -math.inf, math.inf)
        scores = scores.scatter_reduce_(-1, torch.where(inside, last, 0), least, "amin")
    return scores


def _forbid(scores: Tensor, where: Tensor, ids: Tensor) -> Tensor:
    """Forbid ids where [B, S]."""
    return scores.index_copy_(-1, ids, scores.index_select(-1, ids).masked_fill_(where[..., None], -math.inf))


def _early(scores: Tensor, given: Given) -> Tensor:
    """Forbid ids, those that end texts, before the prefix has `number` tokens."""
    return _forbid(scores, given.prefixes.sizes < given.number, given.constants[0])


def _begin(scores: Tensor, given: Given) -> Tensor:
    """Forbid ids after a prefix of `number` tokens."""
    return _forbid(scores, given.prefixes.sizes == given.number, given.constants[0])


def _force(scores: Tensor, given: Given) -> Tensor:
    """After a prefix of `number` tokens, take forced scores [V]."""
    return torch.where((given.prefixes.sizes == given.number)[..., None], given.constants[0], scores)


def _forced(values: Any, room: Room) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    scores = torch.full((room.vocab,), -math.inf, device=room.device)
    return (), (scores.index_fill_(0, room.ids(values), 0.0),)


def _decay(scores: Tensor, given: Given) -> Tensor:
    """Add |score| * (factor ** (tokens past the start) - 1) to the end of text; gains [B, N]: by the prefix's size."""
    eos, gains = given.constants
    old = scores.index_select(-1, eos)
    gain = gains.gather(1, given.prefixes.sizes.clamp(max=gains.shape[1] - 1))
    added = old.abs() * gain[..., None]
    return scores.index_copy_(-1, eos, old + added.masked_fill(~old.isfinite(), 0.0))


def decay_gains(p: hf.ExponentialDecayLengthPenalty, longest: int) -> list[float]:
    """Compute factor ** (tokens past the start) - 1 after prefixes of 0, 1, ... tokens, as far as there is a number."""
    gains: list[float] = []
    with suppress(OverflowError, TypeError):
        for n in range(longest + 1):
            past = n - p.regulation_start
            gains.append(float(pow(p.regulation_factor, past)) - 1 if past > 0 else 0.0)
    return gains


TEXT_FREE = (
    hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization,
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper, hf.EpsilonLogitsWarper, hf.EtaLogitsWarper,
)  # fmt: skip
VECTORISED: dict[type, Form] = {
    **dict.fromkeys(TEXT_FREE, Form(_text_free, lambda p, room: ((p,), ()))),
    hf.SuppressTokensLogitsProcessor: Form(_suppress, lambda p, room: ((), (room.ids(p.suppress_tokens),))),
    hf.SequenceBiasLogitsProcessor: Form(_biases, _prepare_biases),
    hf.NoBadWordsLogitsProcessor: Form(_biases, _prepare_biases),
    hf.RepetitionPenaltyLogitsProcessor: Form(
        _repetition, lambda p, room: ((p.penalty,), ()), lambda p: getattr(p, "prompt_ignore_length", None) or 0
    ),
    PresenceFrequencyPenalty: Form(
        _presence_frequency, lambda p, room: ((p.presence, p.frequency), ()), lambda p: p.prompt_length
    ),
    hf.NoRepeatNGramLogitsProcessor: Form(_no_repeat_ngram, lambda p, room: ((p.ngram_size,), ())),
    hf.MinLengthLogitsProcessor: Form(
        _early, lambda p, room: ((), (room.ids(p.eos_token_id),)), lambda p: p.min_length
    ),
    hf.MinNewTokensLengthLogitsProcessor: Form(
        _early, lambda p, room: ((), (room.ids(p.eos_token_id),)), lambda p: p.prompt_length_to_skip + p.min_new_tokens
    ),
    hf.SuppressTokensAtBeginLogitsProcessor: Form(
        _begin, lambda p, room: ((), (room.ids(p.begin_suppress_tokens),)), lambda p: p.begin_index
    ),
    hf.ForcedBOSTokenLogitsProcessor: Form(_force, lambda p, room: _forced(p.bos_token_id, room), lambda p: 1),
    hf.ForcedEOSTokenLogitsProcessor: Form(
        _force, lambda p, room: _forced(p.eos_token_id, room), lambda p: p.max_length - 1
    ),
    hf.ExponentialDecayLengthPenalty: Form(
        _decay,
        lambda p, room: ((), (room.ids(p.eos_token_id), torch.zeros(room.rows, room.longest + 1, device=room.device))),
    ),
}
