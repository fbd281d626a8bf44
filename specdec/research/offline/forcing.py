"""Teacher forcing: a text as target and draft see it, a pass of each over what is written already.

At every token x of the text that gives the probability w that a tested draft would have been accepted there, given that
x was written, and the draft's confidence. For argmax proposals (greedy, `match`) and for `coupled` samples, whose
random numbers are the target's own and so known, w is 1 or 0. Under `leviathan` w = min(1, q(x) / p(x)), for reasons
that are in specdec.theory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.device.transfer import to_device
from specdec.drafters.base import pad_vocabulary
from specdec.drafters.siblings import best_siblings, sample_siblings
from specdec.errors import SpecdecError
from specdec.models.runner import Runner, Shapes
from specdec.sampling.sampling import History, Purpose, fold, race, streams
from specdec.theory import coupled_joint

CHUNK = 64  # tokens of a pass: bounds the memory that distributions take
SAMPLES = 32  # of siblings at each place of a text, under leviathan


@dataclass(frozen=True)
class ForcedText:
    """A text as target and draft see it; n output tokens, float64 [n] each.

    weight: P(a tested draft was accepted | this token was written).
    confidence: the draft's top probability at T = 1.
    expected: P(a tested draft is accepted) before this token is known.
    siblings [n, C]: P(the draft's i-th sibling was accepted | this token was written), if asked for.
    """

    prompt: np.ndarray
    output: np.ndarray
    weight: np.ndarray
    confidence: np.ndarray
    expected: np.ndarray
    siblings: np.ndarray | None = None


def force(
    decoder: Any, call: Any, outputs: Sequence[Sequence[int]], acceptance: str, siblings: int = 0
) -> list[ForcedText]:
    """Read each text with target and draft; without a draft model all numbers are NaN.

    siblings: of trees, of which the chances are wanted as well; 0 = none
    """
    if len(outputs) != len(call.rows):
        raise SpecdecError(f"what_if: got {len(outputs)} outputs for {len(call.rows)} rows")
    rule = "greedy" if call.sampling.greedy else acceptance
    with _reading(decoder, call, outputs) as readers:
        return [_forced(readers, row, output, rule, siblings) for row, output in zip(call.rows, outputs, strict=True)]


def read_pair(decoder: Any, call: Any, outputs: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The processed scores [n, V] of target and draft that each text's n tokens were sampled from, on the CPU."""
    with _reading(decoder, call, outputs) as readers:
        for row, output in zip(call.rows, outputs, strict=True):
            p, q = (torch.cat([scores.cpu() for scores, _ in reader.read(row, output)]) for reader in readers)
            yield p, q


@contextmanager
def _reading(decoder: Any, call: Any, outputs: Sequence[Sequence[int]]) -> Iterator[list[_Reader]]:
    """Readers for target and draft; none without a draft model."""
    longest = max((len(row.prompt) + len(output) for row, output in zip(call.rows, outputs, strict=True)), default=1)
    readers: list[_Reader] = []
    try:
        if decoder.draft is not None:
            vocab = decoder.target.vocab_size
            readers += [_Reader(runner, call, vocab, longest) for runner in (decoder.target, decoder.draft)]
        yield readers
    finally:
        for reader in readers:
            reader.close()


def _forced(readers: Sequence[_Reader], row: Any, output: Sequence[int], rule: str, siblings: int) -> ForcedText:
    parts = [np.full((3, len(output)), np.nan)]
    chances = [np.full((len(output), siblings), np.nan)]
    if readers and len(output):
        device = readers[0].runner.device
        target, draft = (reader.read(row, output) for reader in readers)
        ids = to_device(list(output), device).split(CHUNK)
        noise = _streams(row, len(output), device).split(CHUNK)
        given = list(zip(target, draft, ids, noise, strict=True))
        parts = [_judge(p, q, x, own, rule) for p, q, x, own in given]
        if siblings:
            chances = [_siblings(p[0], q[0], x, own, rule, siblings) for p, q, x, own in given]
    weight, confidence, expected = np.concatenate(parts, axis=1)
    prompt, written = (np.asarray(ids, dtype=np.int64) for ids in (row.prompt, output))
    return ForcedText(prompt, written, weight, confidence, expected, np.concatenate(chances) if siblings else None)


class _Reader:
    """Reads the texts of a call with one model. A prompt that follows itself (`num_return_sequences`) is fed once: it
    took most of the time."""

    def __init__(self, runner: Runner, call: Any, vocab: int, longest: int):
        self.runner, self.call, self.vocab = runner, call, vocab
        capacity = min(longest, runner.context)
        self.cache = runner.pool.lease(1, capacity)
        self.shapes = Shapes.choose(runner.device, False, capacity)
        self.fed: list[int] = []

    def close(self) -> None:
        self.runner.pool.give_back(self.cache)

    def read(self, row: Any, output: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Processed scores [c, V] and raw top probabilities [c] of the distributions that `output` was sampled from, by
        chunks."""
        runner, call, ids = self.runner, self.call, [*row.prompt, *output]
        if len(ids) > runner.context:
            raise SpecdecError(
                f"what_if: row {row.index} has {len(ids)} tokens, a model has a context of {runner.context}"
            )
        processors = None
        if call.sampling.row_processors is not None:
            processors = call.sampling.row_processors(row.index, row.prompt, row.stops.max_new_tokens)
        start, found = self._prefill(ids[: len(row.prompt) - 1]), []
        while start < len(ids) - 1:
            if runner.follow(self.cache, 0, start):
                runner.prefill(self.cache, self.shapes, {0: ids[:start]}, {0: 0})
                self.fed = []
            fed = ids[start : min(start + CHUNK, start + 1 + runner.before_switch(start), len(ids) - 1)]
            padded = fed + [0] * (self.shapes.width(len(fed)) - len(fed))
            tokens = to_device([padded], runner.device)
            logits = runner.step(self.cache, self.shapes, tokens, [start], [len(fed)]).logits[:, : len(fed)]
            logits = pad_vocabulary(logits, self.vocab, runner.excluded)
            history = None
            if processors is not None:
                known = to_device(ids[:start], runner.device)
                history = History([known], tokens[:, : len(fed)], [processors], [len(fed)])
            confidence = torch.softmax(logits[0].float(), dim=-1).amax(dim=-1)
            found.append((call.sampling.scores(logits, history)[0], confidence))
            start += len(fed)
        return found

    def _prefill(self, prompt: list[int]) -> int:
        """Feed a prompt without its newest token, unless it is there already. Returns its length."""
        again = not self.runner.follow(self.cache, 0, len(prompt)) and bool(self.fed) and self.fed == prompt
        again = again and self.cache.states is None  # states have read the text that followed it
        self.cache.wipe(0, len(prompt) if again else 0)
        if not again:
            self.runner.prefill(self.cache, self.shapes, {0: prompt}, {0: 0})
            self.fed = prompt
        return len(prompt)


def _streams(row: Any, n: int, device: torch.device) -> Tensor:
    """The random streams of the target's own samples in a row's n output tokens."""
    positions = torch.arange(len(row.prompt), len(row.prompt) + n, device=device)
    return streams(torch.full_like(positions, row.key), positions, Purpose.SAMPLE)


def _judge(
    target: tuple[Tensor, Tensor], draft: tuple[Tensor, Tensor], x: Tensor, own: Tensor, rule: str
) -> np.ndarray:
    """weight, confidence, expected acceptance: float64 [3, c], from what `_read` gave, written ids and streams [c]."""
    q_scores, confidence = (t.to(x.device) for t in draft)
    p, q = (torch.softmax(scores, dim=-1) for scores in (target[0], q_scores))
    at = x[:, None]
    if rule == "leviathan":
        # A token that rounding has put outside a cut of p was written nevertheless; no draft is accepted there.
        weight = (q.double().gather(-1, at) / p.double().gather(-1, at))[:, 0].nan_to_num(0.0, 0.0).clamp(0.0, 1.0)
        expected = torch.minimum(p, q).sum(dim=-1)
    elif rule == "coupled":
        weight = race(q, own) == x
        expected = coupled_joint(p.double(), q.double()).sum(dim=-1)
    else:
        best = q_scores.argmax(dim=-1)
        weight = best == x
        agreed = best == target[0].argmax(dim=-1)
        expected = agreed if rule == "greedy" else p.gather(-1, best[:, None])[:, 0]
    return torch.stack([v.double() for v in (weight, confidence, expected)]).cpu().numpy()


def _siblings(p_scores: Tensor, q_scores: Tensor, x: Tensor, own: Tensor, rule: str, count: int) -> np.ndarray:
    """P(the i-th sibling was accepted | the text), float64 [c, count], from scores [c, V], written ids and streams [c].

    Where siblings are best tokens, or `coupled`, it is known which of them is the written token. Under `leviathan` the
    i-th is accepted with the chance that those before it were rejected, times min(p_i(x), q_i(x)) / p(x), where p_i and
    q_i are what they leave: an average over samples of them, without bias.
    """
    p, q = (torch.softmax(scores.to(x.device), dim=-1) for scores in (p_scores, q_scores))
    if rule == "coupled":
        return (sample_siblings(q, own, count)[0] == x[:, None]).double().cpu().numpy()
    if rule != "leviathan":
        return (best_siblings(q_scores.to(x.device), count)[0] == x[:, None]).double().cpu().numpy()
    at = x[:, None]
    found = torch.zeros((len(x), count), dtype=torch.float64, device=x.device)
    for sample in range(SAMPLES):
        tokens, q_left = sample_siblings(q, fold(own, sample), count)
        left, none = p, torch.ones_like(found[:, 0])
        for i in range(count):
            q_i, token = q_left[:, i], tokens[:, i : i + 1]
            found[:, i] += none * torch.minimum(left, q_i).gather(1, at)[:, 0]
            ratio = left.gather(1, token) / q_i.gather(1, token)
            none = none * (1.0 - ratio[:, 0].nan_to_num(0.0).clamp(max=1.0))
            rest = (left - q_i).clamp(min=0)
            mass = rest.sum(dim=-1, keepdim=True)
            left = torch.where(mass > 0, rest / mass, left)
    chance = found / SAMPLES / p.double().gather(1, at)
    return chance.nan_to_num(0.0, 0.0, 0.0).cpu().numpy()
