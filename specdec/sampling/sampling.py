"""From logits to the target's distribution, and the counter-based random numbers that sample it.

`Sampling` is one call's pipeline: transformers' own logits processors and warpers, in transformers' order. Warpers
(temperature, top-k, top-p, min-p, ...) look at scores only. Processors that read the text (repetition penalty,
no-repeat-ngram, a user's own, ...) see at every position exactly the prefix that would have been accepted there
(sampling/processors.py); so a speculative run sees what a plain run sees.

Random numbers are a hash of (seed, row, position, purpose, token id): no generator, no state, no order of calls.
Tokens are sampled by exponential races, argmin E / p: float32 uniforms would cut the tail of Gumbel noise on large
vocabularies.
Source: the exponential-race form of Gumbel-max (Maddison, Tarlow & Minka 2014); the hash is the finaliser of
SplitMix64 (Steele, Lea & Flood 2014) in wrapping int64 arithmetic.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.utils import GenerationMixin

from specdec.errors import SpecdecError
from specdec.files.fields import OWN_FIELDS, TEXT_FIELDS, WARPER_FIELDS
from specdec.sampling.constraints import AllowedTokens, PrefixProcessor, PrefixStates
from specdec.sampling.prefixes import History as History
from specdec.sampling.processors import (
    AllRows,
    PresenceFrequencyPenalty,
    RowProcessors,
    Texts,
    apply_processors,
    plain_settings,
)
from specdec.sampling.texts import KnownTexts

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a random number is for; different purposes never share a number."""

    SAMPLE = 1  # the target's own token: plain sampling, match, bonus tokens; under coupled the draft's as well
    ACCEPT = 2  # the coin of leviathan acceptance
    RESIDUAL = 3  # the token from the residual after a rejection
    DRAFT = 4  # the draft's token under leviathan; its key carries the round


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically (torch's shift is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX2)
    return x ^ _shift(x, 31)


def fold(key: Tensor, counter: Tensor | int) -> Tensor:
    """Make a key from a key and a counter; int64 tensors, broadcast."""
    step = _signed((counter + 1) * _GOLDEN) if isinstance(counter, int) else (counter + 1) * _signed(_GOLDEN)
    return _mix(key + step)


def fold_int(key: int, counter: int) -> int:
    """Compute `fold` of Python ints on the host."""
    x = (key + (counter + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return _signed(x ^ (x >> 31))


def row_key(seed: int, row: int) -> int:
    """Make the key of one row, from which all its random numbers are derived."""
    return fold_int(fold_int(0, seed & _MASK), row)


def streams(keys: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Make one key per token: keys [...], positions [...] (broadcast) -> int64 [...]."""
    return fold(fold(keys, int(purpose)), positions)


def sibling_stream(stream: Tensor, i: int) -> Tensor:
    """Make the key of the i-th of several independent races at one place; the first has the place's own."""
    return stream if i == 0 else fold(stream, i)


def uniform(stream: Tensor) -> Tensor:
    """Make float32 numbers in (0, 1) from the upper 32 bits: near 0 they are as dense as float32 itself."""
    u = (_shift(stream, 32).to(torch.float32) + 0.5) * 2.0**-32
    return u.clamp(max=1.0 - 2.0**-24)


def exponential(stream: Tensor, size: int) -> Tensor:
    """Make independent unit exponentials, one per token id: stream [...] -> [..., size]."""
    ids = torch.arange(size, device=stream.device)
    return -torch.log1p(-uniform(fold(stream[..., None], ids)))


def race(p: Tensor, stream: Tensor) -> Tensor:
    """Sample p: weights [..., V], not necessarily normalised; stream [...] -> token ids [...]."""
    return (exponential(stream, p.shape[-1]) / p).argmin(dim=-1)


BLOCK = 1024  # ids that one processor of a GPU compares
FEW = 8  # largest scores that compiled code looks for one after another


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the argmax of logits [..., V] (the first; NaN counts as greatest), and True where its score is finite."""
    if not torch.compiler.is_compiling():
        token = logits.argmax(dim=-1)
        return token, logits.gather(-1, token[..., None])[..., 0].isfinite()
    value, token = _best_by_blocks(logits)
    return token, value.isfinite()


def _best_by_blocks(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of scores [..., V] and its id, in a form for the compiler, which gives a whole row to one
    processor: the best of each block first, then the best of these."""
    padded = F.pad(scores, (0, -scores.shape[-1] % BLOCK), value=float("-inf"))
    values, places = padded.reshape(*scores.shape[:-1], -1, BLOCK).max(dim=-1)
    block = values.argmax(dim=-1, keepdim=True)
    return values.amax(dim=-1), (block * BLOCK + places.gather(-1, block))[..., 0]


def largest(scores: Tensor, count: int, blocks: bool | None = None) -> tuple[Tensor, Tensor]:
    """Return the `count` largest scores [..., V], largest first, and their ids, both [..., C] with C <= V.

    blocks: take the largest of each block first; None: on a GPU, where one row would keep few processors busy
    """
    count, width = min(count, scores.shape[-1]), scores.shape[-1]
    if count <= FEW and torch.compiler.is_compiling():
        return _largest_in_turn(scores, count)
    if not (scores.is_cuda if blocks is None else blocks) or count > BLOCK or width <= 4 * BLOCK:
        return scores.topk(count)  # type: ignore[return-value]
    padded = F.pad(scores, (0, -width % BLOCK), value=float("-inf"))
    found, places = padded.unflatten(-1, (-1, BLOCK)).topk(count)  # [..., blocks, C]
    values, chosen = found.flatten(-2).topk(count)
    ids = places + torch.arange(places.shape[-2], device=scores.device)[:, None] * BLOCK
    return values, ids.flatten(-2).gather(-1, chosen).clamp(max=width - 1)


def _largest_in_turn(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Do `largest` by a search for each of a few: short kernels, where one that sorts takes long.

    Where fewer scores are finite, the ids of the others may be the same.
    """
    ids, found = torch.arange(scores.shape[-1], device=scores.device), []
    for _ in range(count):
        found.append(_best_by_blocks(scores))
        scores = scores.masked_fill(ids == found[-1][1][..., None], float("-inf"))
    values, tokens = zip(*found, strict=True)
    return torch.stack(values, dim=-1), torch.stack(tokens, dim=-1)


@dataclass(frozen=True)
class Sampling:
    """One call's pipeline from logits to scores, whose softmax is the distribution that is sampled.

    temperature: 0 = greedy; warpers then do not apply, as in transformers
    warpers: applied after the temperature
    row_processors: (row, prompt, max_new) -> the text-reading processors of a row; None: the call has none
    """

    temperature: float
    warpers: tuple[Any, ...] = ()
    row_processors: Callable[[int, Sequence[int], int], RowProcessors] | None = None

    @property
    def greedy(self) -> bool:
        # Below float32's smallest normal number the division overflows; the distribution is one-hot long before.
        return self.temperature < 1e-30

    @cached_property
    def signature(self) -> tuple[Any, ...] | None:
        """Equal for pipelines that compute the same; None if that cannot be told."""
        parts: list[Any] = [self.temperature]
        for warper in self.warpers:
            parts.append(plain_settings(warper))
        return None if None in parts else tuple(parts)

    def signature_with(self, texts: KnownTexts | None) -> tuple[Any, ...] | None:
        """Return the signature of the whole pipeline, with the stages that read `texts`."""
        parts = self.signature, () if texts is None else texts.signature
        return None if None in parts else parts

    def scores(self, logits: Tensor, texts: Texts | History | None = None) -> Tensor:
        """Compute scores float32 [B, S, V] from logits [B, S, V]. texts: given iff the call has row processors."""
        scores = logits.to(torch.float32, copy=texts is not None)
        if texts is not None:
            if isinstance(texts, History):
                texts = KnownTexts.of(texts, scores)
            scores = apply_processors(scores, texts)
        if self.greedy:
            return scores
        # Shift before dividing: at T = 1e-4 the scores stay finite, and 0 / T is exactly 0 at the maximum.
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / self.temperature
        flat = scores.reshape(-1, scores.shape[-1])
        no_text = torch.empty((flat.shape[0], 0), dtype=torch.int64, device=flat.device)
        for warper in self.warpers:
            flat = warper(no_text, flat)
        return flat.reshape(scores.shape)

    def choose(self, scores: Tensor, stream: Tensor) -> Tensor:
        """Choose the token that plain decoding emits: scores [..., V], stream [...] -> ids [...]."""
        if self.greedy:
            return scores.argmax(dim=-1)
        return race(torch.softmax(scores, dim=-1), stream)


_NEUTRAL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0, "repetition_penalty": 1.0}


def build_sampling(
    model: Any,
    fields: dict[str, Any],
    temperature: float,
    eos: Sequence[int],
    given: Sequence[Any],
    allowed: Any,
    device: torch.device,
    returned: int = 1,
) -> Sampling:
    """Build a call's `Sampling` from options that config.py has checked.

    model: in whose name transformers makes the processors
    fields: options by their names in GenerationConfig, and those of `OWN_FIELDS`
    temperature: 0 = greedy
    eos: ids that end the text
    given: the caller's own processors
    allowed: transformers' prefix_allowed_tokens_fn
    returned: rows per prompt
    Raises SpecdecError for exponential_decay_length_penalty without eos.
    """
    factory = _ProcessorFactory(model, fields, eos, given, allowed, device, returned)
    return Sampling(temperature, factory.warpers(), factory.of_row if factory.reads_text else None)


@dataclass
class _ProcessorFactory:
    """Makes a call's warpers, and the text-reading processors of its rows, from what `build_sampling` is given.

    made: processors for all rows, by (prompt length, max_new)
    warned: types of processors that were warned about
    """

    model: Any
    fields: dict[str, Any]
    eos: Sequence[int]
    given: Sequence[Any]
    allowed: Any
    device: torch.device
    returned: int
    made: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.presence, self.frequency = (self.fields.get(name) or 0.0 for name in OWN_FIELDS)
        unset = [name for name, value in self.fields.items() if value is None or (name, value) == ("min_p", 0.0)]
        self.fields = {name: v for name, v in self.fields.items() if name not in (*unset, *OWN_FIELDS)}
        if "exponential_decay_length_penalty" in self.fields and not self.eos:
            raise SpecdecError("exponential_decay_length_penalty needs a token that ends texts: give eos_token_id")
        own = self.presence or self.frequency or self.given or self.allowed
        self.reads_text = bool(own or any(name in self.fields for name in TEXT_FIELDS))

    def warpers(self) -> tuple[Any, ...]:
        """Make the warpers but for the temperature, which `Sampling` applies."""
        return tuple(w for w in self._make(True, WARPER_FIELDS, 1, 1) if not isinstance(w, TemperatureLogitsWarper))

    def of_row(self, row: int, prompt: Sequence[int], max_new: int) -> RowProcessors:
        """Make the processors of a row: `Sampling.row_processors`."""
        made = RowProcessors(self._own(p, row, prompt) for p in self._shared(len(prompt), max_new))
        if self.presence or self.frequency:
            penalty = PresenceFrequencyPenalty(self.presence, self.frequency, len(prompt))
            made.insert(_after_repetition(made), penalty)
        return made

    def _shared(self, prompt_len: int, max_new: int) -> list[Any]:
        key = (prompt_len, max_new)
        if key not in self.made:
            made = self._make(False, TEXT_FIELDS, prompt_len, max_new, prefix_allowed_tokens_fn=self.allowed)
            self.made[key] = _merged(made, self.given, self.warned)
        return self.made[key]

    def _own(self, processor: Any, row: int, prompt: Sequence[int]) -> Any:
        """Give a row its own state or index, if the processor has one."""
        if isinstance(processor, PrefixProcessor):
            return PrefixStates(processor, prompt)
        if type(processor) is PrefixConstrainedLogitsProcessor:
            is_given = any(processor is p for p in self.given)
            beams = processor._num_beams if is_given else self.returned
            asked = AllowedTokens(processor._prefix_allowed_tokens_fn, row // beams, self.device)
            return PrefixStates(asked, prompt)
        return processor.of(row) if isinstance(processor, AllRows) else processor

    def _make(self, sample: bool, names: Sequence[str], prompt_len: int, max_new: int, **extra: Any) -> list[Any]:
        """Have transformers make the processors of some fields."""
        chosen = {name: self.fields.get(name, _NEUTRAL.get(name)) for name in (*_NEUTRAL, *names) if name in names}
        # Greedy configs get no warper fields: transformers does not read them there, but warns about them.
        unused = set(chosen) | (set() if sample else set(WARPER_FIELDS))
        neutral = {name: value for name, value in _NEUTRAL.items() if name not in unused}
        neutral.update(num_beams=1, num_return_sequences=1)  # read for prefix_allowed_tokens_fn
        config = GenerationConfig(do_sample=sample, max_length=prompt_len + max_new, **neutral, **chosen)
        config._eos_token_tensor = torch.tensor(list(self.eos), device=self.device) if self.eos else None
        return GenerationMixin._get_logits_processor(
            self.model, config, input_ids_seq_length=prompt_len, device=str(self.device), model_kwargs={}, **extra
        )


def _merged(made: Sequence[Any], given: Sequence[Any], warned: set[str]) -> list[Any]:
    """Put a user's processor in place of one of its type that an option has made, with a warning; append the others.

    That is transformers' rule. warned: names of types that were warned about, once per call.
    """
    kinds = [type(p.processor if isinstance(p, AllRows) else p) for p in given]
    merged = []
    for processor in made:
        name = type(processor).__name__
        if type(processor) in kinds and name not in warned:
            warned.add(name)
            warnings.warn(f"logits_processor has a {name}: the option that makes one has no effect", stacklevel=2)
        merged.append(given[kinds.index(type(processor))] if type(processor) in kinds else processor)
    return [*merged, *(p for p in given if not any(p is m for m in merged))]


def _after_repetition(processors: Sequence[Any]) -> int:
    """Find where presence and frequency penalties belong: after the repetition penalty, as in vLLM."""
    before = (SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor)
    return next((i for i, p in enumerate(processors) if type(p) not in before), len(processors))
