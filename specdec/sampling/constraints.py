"""Processors with a state: constrained text, and anything else whose state is a function of the prefix.

A `LogitsProcessor` that remembers earlier calls breaks under speculative decoding: it is shown drafted prefixes that
are rejected later. Such a processor says how its state follows from the text instead, and specdec keeps the states:

    start(prompt) -> state            the state after the prompt
    advance(state, token) -> state    the state after one more token, `state` itself unchanged; None = the token cannot
                                      follow, and no text with it is ever emitted
    process(state, scores) -> scores  float32 [V], the target's or the draft's scores in this state

`Constraint` is the usual case, where `allowed(state)` names the tokens that may follow. `MatcherConstraint` is for
libraries whose matcher moves along one text and can be rolled back. `Grammar` is one of those: regular expressions,
JSON schemas and Lark grammars through llguidance (`pip install specdec[grammar]`).

States are kept per row as a tree of the continuations seen, so a position costs one `advance` for draft and target
together; tokens after a forbidden one are never looked at. If every allowed token has score -inf, these tokens are
forced, as in transformers' `prefix_allowed_tokens_fn`. Masks apply to the draft's scores before anything is sampled,
hence to q: a forbidden token has p = q = 0. The draft is never cut at a sampled token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from specdec.errors import SpecdecError


@runtime_checkable
class PrefixProcessor(Protocol):
    """A processor whose state is a function of the prefix; see the module's docstring."""

    def start(self, prompt: Sequence[int]) -> Any:
        """Return the state after the prompt."""

    def advance(self, state: Any, token: int) -> Any:
        """Return the state after one more token, or None if it cannot follow. Must not change `state`."""

    def process(self, state: Any, scores: Tensor) -> Tensor:
        """Process scores [V] float32 -> [V]."""


class Constraint:
    """A `PrefixProcessor` that forbids tokens: subclasses give `start`, `advance` and `allowed`."""

    def start(self, prompt: Sequence[int]) -> Any:
        raise NotImplementedError

    def advance(self, state: Any, token: int) -> Any:
        raise NotImplementedError

    def allowed(self, state: Any) -> Tensor | Sequence[int]:
        """Return the tokens that may follow: ids, or bool [n] on the CPU (ids from n on are forbidden)."""
        raise NotImplementedError

    def process(self, state: Any, scores: Tensor) -> Tensor:
        mask = _as_mask(self.allowed(state), scores.shape[-1])
        return scores.masked_fill(~mask.to(scores.device), float("-inf"))


class AllowedTokens(Constraint):
    """transformers' `prefix_allowed_tokens_fn(prompt number, ids) -> allowed ids`, asked once per allowed prefix."""

    def __init__(self, allowed: Callable[[int, Tensor], Sequence[int]], prompt: int, device: torch.device):
        self._ask, self._prompt, self._device = allowed, prompt, device

    def start(self, prompt: Sequence[int]) -> tuple[list[int], Sequence[int]]:
        ids = list(prompt)
        return ids, _flat_ids(self._ask(self._prompt, torch.tensor(ids, device=self._device)))

    def advance(self, state: tuple[list[int], Sequence[int]], token: int) -> tuple[list[int], Sequence[int]] | None:
        ids, allowed = state
        return self.start([*ids, token]) if token in allowed else None

    def allowed(self, state: tuple[list[int], Sequence[int]]) -> Sequence[int]:
        return state[1]


def _flat_ids(allowed: Any) -> list[int]:
    """Read the ids that prefix_allowed_tokens_fn gave: a list, nested or not, an array, a tensor, or a mask.

    Raises SpecdecError for anything else.
    """
    try:
        ids = torch.as_tensor(np.asarray(allowed.cpu() if isinstance(allowed, Tensor) else allowed)).flatten()
    except (TypeError, ValueError, RuntimeError):
        ids = torch.tensor([0.5])
    if ids.dtype == torch.bool:
        return ids.nonzero().flatten().tolist()
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or int(ids.min()) < 0):
        raise SpecdecError(f"prefix_allowed_tokens_fn must return token ids, got {allowed!r:.80}")
    return [int(i) for i in ids.tolist()]


def _as_mask(allowed: Tensor | Sequence[int], vocab: int) -> Tensor:
    """Make a mask, bool [vocab] on the CPU."""
    mask = torch.zeros(vocab, dtype=torch.bool)
    if isinstance(allowed, Tensor) and allowed.dtype == torch.bool:
        mask[: len(allowed)] = allowed.cpu()[:vocab]
    else:
        ids = torch.as_tensor(allowed, dtype=torch.int64).cpu()
        mask[ids[ids < vocab]] = True
    return mask


@dataclass
class _Node:
    state: Any
    children: dict[int, _Node | None] = field(default_factory=dict)
    mask: Tensor | None = None


class PrefixStates:
    """One row's states of one processor. `size`: ids of the emitted text, prompt included."""

    def __init__(self, processor: PrefixProcessor, prompt: Sequence[int]):
        self.processor, self.size = processor, len(prompt)
        self.root: _Node | None = _Node(processor.start(prompt))

    def commit(self, tokens: Sequence[int]) -> None:
        """Move on by emitted `tokens`; other continuations are forgotten."""
        self.root = self.at(tokens)
        self.size += len(tokens)

    def at(self, tokens: Sequence[int]) -> _Node | None:
        """Return the state after the emitted text and `tokens`; None if they cannot follow."""
        node = self.root
        for token in tokens:
            if node is None:
                return None
            if token not in node.children:
                state = self.processor.advance(node.state, token)
                node.children[token] = None if state is None else _Node(state)
            node = node.children[token]
        return node

    def mask(self, node: _Node, vocab: int) -> Tensor | None:
        """Return the allowed tokens as bool [vocab] on the CPU; None for a processor that is no constraint."""
        if node.mask is None and isinstance(self.processor, Constraint):
            node.mask = _as_mask(self.processor.allowed(node.state), vocab)
        return node.mask

    def process(self, node: _Node, scores: Tensor) -> Tensor:
        """Process scores [V] -> [V]."""
        return self.processor.process(node.state, scores)


class Matcher(Protocol):
    """An automaton that moves along one text."""

    def accept(self, token: int) -> bool:
        """Move on by one token; False, and no move, if the token cannot follow."""

    def rollback(self, n: int) -> None:
        """Take back the newest `n` tokens."""

    def mask(self) -> Tensor | Sequence[int]:
        """Return what may follow, as `Constraint.allowed` does."""


@dataclass(eq=False)
class _Place:
    """A place in the text where a matcher can be."""

    cursor: _Cursor
    parent: _Place | None = None
    token: int = -1
    depth: int = 0


class _Cursor:
    """A matcher and where it is."""

    def __init__(self, matcher: Matcher):
        self.matcher = matcher
        self.place = _Place(self)

    def go(self, target: _Place) -> None:
        """Roll back to the last place that both texts share, then forward."""
        here, there, back, forward = self.place, target, 0, []
        while here is not there:
            if here.depth >= there.depth:
                assert here.parent is not None
                here, back = here.parent, back + 1
            else:
                assert there.parent is not None
                forward.append(there.token)
                there = there.parent
        if back:
            self.matcher.rollback(back)
        for token in reversed(forward):
            self.matcher.accept(token)
        self.place = target


class MatcherConstraint(Constraint):
    """A constraint made of a matcher with rollback: subclasses give `matcher(prompt)`, a new one for each row."""

    def matcher(self, prompt: Sequence[int]) -> Matcher:
        """Make the matcher of a row."""
        raise NotImplementedError

    def start(self, prompt: Sequence[int]) -> _Place:
        return _Cursor(self.matcher(prompt)).place

    def advance(self, state: _Place, token: int) -> _Place | None:
        cursor = state.cursor
        cursor.go(state)
        if not cursor.matcher.accept(token):
            return None
        cursor.place = _Place(cursor, state, token, state.depth + 1)
        return cursor.place

    def allowed(self, state: _Place) -> Tensor | Sequence[int]:
        state.cursor.go(state)
        return state.cursor.matcher.mask()


class Grammar(MatcherConstraint):
    """Output that follows a grammar; the prompt is not part of it. The text may end where the grammar may.

    grammar: in llguidance's form (`regex`, `json_schema` and `lark` make one)
    tokenizer: the target's, a fast one
    eos_token_id: ids that end the text; None = the tokenizer's
    Raises SpecdecError without llguidance and for a grammar that it refuses.
    Source: https://github.com/guidance-ai/llguidance.
    """

    def __init__(self, grammar: str, tokenizer: Any, eos_token_id: int | Sequence[int] | None = None):
        self._library = _llguidance()
        self._tokens = _token_table(tokenizer, eos_token_id)
        self.grammar = grammar
        error = self._library.LLMatcher.validate_grammar(grammar, self._tokens)
        if error and not error.startswith("WARNING"):
            raise SpecdecError(f"grammar refused: {' '.join(error.split())}")

    @classmethod
    def regex(cls, pattern: str, tokenizer: Any, eos_token_id: int | Sequence[int] | None = None) -> Grammar:
        """Make output match a regular expression (Rust's syntax) as a whole."""
        return cls(_llguidance().LLMatcher.grammar_from_regex(pattern), tokenizer, eos_token_id)

    @classmethod
    def json_schema(
        cls, schema: str | Mapping[str, Any], tokenizer: Any, eos_token_id: int | Sequence[int] | None = None
    ) -> Grammar:
        """Make output JSON that the schema accepts."""
        library = _llguidance()
        try:
            text = schema if isinstance(schema, str) else json.dumps(dict(schema))
            return cls(library.LLMatcher.grammar_from_json_schema(text), tokenizer, eos_token_id)
        except (ValueError, TypeError) as error:
            raise error if isinstance(error, SpecdecError) else SpecdecError(f"JSON schema refused: {error}") from None

    @classmethod
    def lark(cls, text: str, tokenizer: Any, eos_token_id: int | Sequence[int] | None = None) -> Grammar:
        """Make output follow a Lark grammar with the rule `start`."""
        return cls(_llguidance().LLMatcher.grammar_from_lark(text), tokenizer, eos_token_id)

    def matcher(self, prompt: Sequence[int]) -> Matcher:
        return _LLMatcher(self._library.LLMatcher(self._tokens, self.grammar))


class _LLMatcher:
    def __init__(self, inner: Any):
        self.inner = inner

    def accept(self, token: int) -> bool:
        return bool(self.inner.try_consume_tokens([token]) == 1)

    def rollback(self, n: int) -> None:
        if not self.inner.rollback(n):
            raise SpecdecError(f"grammar: llguidance cannot roll back {n} tokens: {self.inner.get_error()}")

    def mask(self) -> Tensor:
        packed = np.frombuffer(self.inner.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(packed, bitorder="little").astype(bool))


def _llguidance() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError:
        raise SpecdecError("grammars need llguidance: pip install specdec[grammar]") from None
    return llguidance


_TABLES: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def _token_table(tokenizer: Any, eos: int | Sequence[int] | None) -> Any:
    """Make llguidance's form of a tokenizer, once: it takes a second for a large vocabulary."""
    key = eos if eos is None or isinstance(eos, int) else tuple(eos)
    try:
        made = _TABLES.setdefault(tokenizer, {})
        if key not in made:
            ends = list(key) if isinstance(key, tuple) else key
            made[key] = _llguidance().hf.from_tokenizer(tokenizer, eos_token=ends)
    except (ValueError, TypeError) as error:
        raise SpecdecError(f"grammar: {type(tokenizer).__name__} is no fast tokenizer: {error}") from None
    return made[key]
