"""From logits to the target's distribution, and the counter-based random numbers that draw from it.

`Sampling` is one call's pipeline: transformers' own logits processors and warpers, in transformers' order. Warpers
(temperature, top-k, top-p, min-p, ...) look at scores only. Processors that read the text (repetition penalty,
no-repeat-ngram, a user's own, ...) see at every position exactly the prefix that would have been accepted there
(sampling/processors.py); so a speculative run sees what a plain run sees.

Random numbers are a hash of (seed, row, position, purpose, token id): no generator, no state, no order of calls.
Draws are exponential races, argmin E / p: float32 uniforms would cut the tail of Gumbel noise on large vocabularies.
Source: the exponential-race form of Gumbel-max (Maddison, Tarlow & Minka 2014); the hash is the finaliser of
SplitMix64 (Steele, Lea & Flood 2014) in wrapping int64 arithmetic.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
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
from specdec.sampling.constraints import AllowedTokens, PrefixProcessor, PrefixStates
from specdec.sampling.prefixes import History as History
from specdec.sampling.processors import AllRows, PresenceFrequencyPenalty, RowProcessors, apply_processors

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a random number is for; different purposes never share a number."""

    SAMPLE = 1  # the target's own draw: plain sampling, match, bonus tokens; under coupled the draft's as well
    ACCEPT = 2  # the coin of leviathan acceptance
    RESIDUAL = 3  # the draw from the residual after a rejection
    DRAFT = 4  # the draft's draw under leviathan; its key carries the round


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX2)
    return x ^ _shift(x, 31)


def fold(key: Tensor, counter: Tensor | int) -> Tensor:
    """A new key from a key and a counter; int64 tensors, broadcast."""
    step = _signed((counter + 1) * _GOLDEN) if isinstance(counter, int) else (counter + 1) * _signed(_GOLDEN)
    return _mix(key + step)


def fold_int(key: int, counter: int) -> int:
    """`fold` on the host, for Python ints; equal to the tensor version."""
    x = (key + (counter + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return _signed(x ^ (x >> 31))


def row_key(seed: int, row: int) -> int:
    """The key of one row: everything random in it is derived from this number."""
    return fold_int(fold_int(0, seed & _MASK), row)


def streams(keys: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """One key per draw: keys [...], positions [...] (broadcast) -> int64 [...]."""
    return fold(fold(keys, int(purpose)), positions)


def uniform(stream: Tensor) -> Tensor:
    """float32 in (0, 1), from the upper 32 bits: the relative resolution near 0 is float32's own."""
    u = (_shift(stream, 32).to(torch.float32) + 0.5) * 2.0**-32
    return u.clamp(max=1.0 - 2.0**-24)


def exponential(stream: Tensor, size: int) -> Tensor:
    """Independent unit exponentials [..., size], one per token id, for draws [...]."""
    ids = torch.arange(size, device=stream.device)
    return -torch.log1p(-uniform(fold(stream[..., None], ids)))


def race(p: Tensor, stream: Tensor) -> Tensor:
    """Draw from p: weights [..., V], not necessarily normalised; stream [...] -> token ids [...]."""
    return (exponential(stream, p.shape[-1]) / p).argmin(dim=-1)


BLOCK = 1024  # ids whose best is found by one processor of a GPU


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first greatest of logits [..., V], and whether it is finite. A NaN counts as the greatest."""
    if not torch.compiler.is_compiling():
        token = logits.argmax(dim=-1)
        return token, logits.gather(-1, token[..., None])[..., 0].isfinite()
    # The compiler gives a whole row to one processor: blocks of it first, then the best of them.
    padded = F.pad(logits, (0, -logits.shape[-1] % BLOCK), value=float("-inf"))
    values, places = padded.reshape(*logits.shape[:-1], -1, BLOCK).max(dim=-1)
    block = values.argmax(dim=-1, keepdim=True)
    token = (block * BLOCK + places.gather(-1, block))[..., 0]
    return token, values.amax(dim=-1).isfinite()


@dataclass(frozen=True)
class Sampling:
    """One call's pipeline from logits to scores, whose softmax is the law that is sampled.

    temperature: 0 = greedy (then warpers do not apply, as in transformers). `row_processors(row, prompt, max_new)`
    builds the text-reading processors of a row, given its number in the call; it is None when the call has none.
    """

    temperature: float
    warpers: tuple[Any, ...] = ()
    row_processors: Callable[[int, Sequence[int], int], RowProcessors] | None = None

    @property
    def greedy(self) -> bool:
        # Below float32's smallest normal number the division overflows; the law is one-hot long before.
        return self.temperature < 1e-30

    @cached_property
    def signature(self) -> tuple[Any, ...] | None:
        """Equal for pipelines that compute the same; None where that cannot be said."""
        parts: list[Any] = [self.temperature]
        for warper in self.warpers:
            values = tuple(sorted(vars(warper).items()))
            if not all(value is None or isinstance(value, (bool, int, float, str)) for _, value in values):
                return None
            parts.append((type(warper), values))
        return tuple(parts)

    def scores(self, logits: Tensor, history: History | None = None) -> Tensor:
        """logits [B, S, V] -> float32 scores [B, S, V]; `history` must be given iff the call has row processors."""
        scores = logits.to(torch.float32, copy=history is not None)
        if history is not None:
            scores = apply_processors(scores, history)
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
        """The token that plain decoding emits: scores [..., V], stream [...] -> ids [...]."""
        if self.greedy:
            return scores.argmax(dim=-1)
        return race(torch.softmax(scores, dim=-1), stream)


# GenerationConfig fields that transformers turns into processors which read the text, and into warpers which do not.
TEXT_FIELDS = (
    "sequence_bias", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
WARPER_FIELDS = (
    "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "renormalize_logits",
)  # fmt: skip
OWN_FIELDS = ("presence_penalty", "frequency_penalty")  # of no GenerationConfig
_NEUTRAL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0, "repetition_penalty": 1.0}


def build_sampling(
    model: Any,
    fields: dict[str, Any],
    temperature: float,
    eos: Sequence[int],
    user_processors: Sequence[Any],
    allowed: Any,
    device: torch.device,
    returned: int = 1,
) -> Sampling:
    """A `Sampling` from GenerationConfig fields by their own names (values already checked, see config.py), those of
    `OWN_FIELDS`, and a user's processors. allowed: transformers' prefix_allowed_tokens_fn; returned: rows a prompt."""
    active = {name: value for name, value in fields.items() if value is not None and name not in OWN_FIELDS}
    if "exponential_decay_length_penalty" in active and not eos:
        raise SpecdecError("exponential_decay_length_penalty needs a token that ends texts: give eos_token_id")
    presence, frequency = (fields.get(name) or 0.0 for name in OWN_FIELDS)
    if active.get("min_p") == 0.0:
        del active["min_p"]

    def processors(sample: bool, names: Sequence[str], prompt_len: int, max_new: int, **extra: Any) -> list[Any]:
        chosen = {name: active.get(name, _NEUTRAL.get(name)) for name in (*_NEUTRAL, *names) if name in names}
        # Greedy configs are left without warper fields: transformers does not read them there, but warns about them.
        unused = set(chosen) | (set() if sample else set(WARPER_FIELDS))
        neutral = {name: value for name, value in _NEUTRAL.items() if name not in unused}
        neutral.update(num_beams=1, num_return_sequences=1)  # read for prefix_allowed_tokens_fn
        config = GenerationConfig(do_sample=sample, max_length=prompt_len + max_new, **neutral, **chosen)
        config._eos_token_tensor = torch.tensor(list(eos), device=device) if eos else None
        return GenerationMixin._get_logits_processor(
            model, config, input_ids_seq_length=prompt_len, device=str(device), model_kwargs={}, **extra
        )

    warpers = tuple(w for w in processors(True, WARPER_FIELDS, 1, 1) if not isinstance(w, TemperatureLogitsWarper))
    text_fields = any(name in active for name in TEXT_FIELDS) or presence or frequency
    if not (text_fields or user_processors or allowed):
        return Sampling(temperature, warpers)

    warned: set[str] = set()

    @cache
    def shared(prompt_len: int, max_new: int) -> list[Any]:
        made = processors(False, TEXT_FIELDS, prompt_len, max_new, prefix_allowed_tokens_fn=allowed)
        return _merged(made, user_processors, warned)

    def own(processor: Any, row: int, prompt: Sequence[int]) -> Any:
        if isinstance(processor, PrefixProcessor):
            return PrefixStates(processor, prompt)
        if type(processor) is PrefixConstrainedLogitsProcessor:
            given = any(processor is p for p in user_processors)
            beams = processor._num_beams if given else returned
            asked = AllowedTokens(processor._prefix_allowed_tokens_fn, row // beams, device)
            return PrefixStates(asked, prompt)
        return processor.of(row) if isinstance(processor, AllRows) else processor

    def row_processors(row: int, prompt: Sequence[int], max_new: int) -> RowProcessors:
        made = RowProcessors(own(p, row, prompt) for p in shared(len(prompt), max_new))
        if presence or frequency:
            made.insert(_after_repetition(made), PresenceFrequencyPenalty(presence, frequency, len(prompt)))
        return made

    return Sampling(temperature, warpers, row_processors)


def _merged(made: Sequence[Any], given: Sequence[Any], warned: set[str]) -> list[Any]:
    """transformers' rule: a user's processor takes the place of one of its type that an option has made, with a warning
    (once a call: `warned`); the others follow."""
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
    """Where presence and frequency penalties belong: behind the repetition penalty, as in vLLM."""
    before = (SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor)
    return next((i for i, p in enumerate(processors) if type(p) not in before), len(processors))
