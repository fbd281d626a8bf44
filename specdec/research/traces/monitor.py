"""The divergence monitor: warns while a run goes on when a draft is hardly accepted any more, and says what fits.

    monitor = Monitor(decoder)
    trace = record(decoder, prompts, watch=monitor)       # or: for r in decoder.rounds(prompt): monitor(r)
    monitor.found                                          # every warning, with its causes and their evidence

Watched are strategies that a model drafts for. Acceptance is that of tested tokens, over a window of them; one warning
is given when it falls below the threshold, and the next only after it has risen above it again.

The causes are told apart by what they leave in the rounds: a draft whose best token is mostly the target's agrees with
it, and sampling is what costs (temperature); one that was good before the text grew long lost the context; one that was
never good comes from another tokenizer, another family, or sees a prompt without the chat template it was made for. The
evidence is in each cause's text, because two of them can fit at once.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.config import check_number, check_whole
from specdec.decoding.result import Round
from specdec.research.traces.rounds import Node, nodes
from specdec.stats import PER_TESTED

MODEL_STRATEGIES = ("draft-model", "eagle3", "early-exit", "mtp", "dflash")
DISAGREE = 0.3  # a draft whose best token is the target's less often than this is no relative of it


class DivergenceWarning(UserWarning):
    """A draft is hardly accepted."""


@dataclass(frozen=True)
class Cause:
    """name: temperature | context | tokenizer | template | family | weak draft; evidence: a sentence."""

    name: str
    evidence: str


@dataclass(frozen=True)
class Divergence:
    """One warning.

    acceptance: of the tested tokens in the window.
    position: sequence index where it was noticed.
    causes: the likeliest first.
    """

    strategy: str
    row: int
    position: int
    acceptance: float
    window: int
    causes: list[Cause]

    def __str__(self) -> str:
        fits = "; ".join(f"{c.name}: {c.evidence}" for c in self.causes)
        return (
            f"{self.strategy}: {PER_TESTED} {self.acceptance:.2f} over the last {self.window} tested tokens "
            f"(row {self.row}, position {self.position}); what fits: {fits}"
        )


@dataclass
class _Seen:
    """A tested token. agrees: whether the draft's best token is the target's; None, as entropy: unknown."""

    accepted: bool
    agrees: bool | None
    entropy: float | None


@dataclass
class _Window:
    seen: deque[_Seen]  # as long as the window
    first: float | None = None  # acceptance of the first full window
    low: bool = False

    def add(self, entry: _Seen) -> None:
        self.seen.append(entry)
        if self.first is None and len(self.seen) == self.seen.maxlen:
            self.first = self.acceptance

    @property
    def acceptance(self) -> float:
        return sum(e.accepted for e in self.seen) / len(self.seen)

    def mean(self, name: str) -> float | None:
        """The mean of `agrees` or `entropy` where it is known."""
        known = [value for e in self.seen if (value := getattr(e, name)) is not None]
        return sum(known) / len(known) if known else None


@dataclass
class Monitor:
    """Call it with every round.

    decoder: its pair and tokenizer help to find causes; None = rounds alone.
    window: tested tokens.
    chat: whether the prompts went through the chat template.
    warn: called with each warning's text; None = `warnings.warn`.
    """

    decoder: Any = None
    window: int = 64
    threshold: float = 0.5
    chat: bool = False
    warn: Callable[[str], Any] | None = None
    windows: dict[str, _Window] = field(default_factory=dict, init=False)
    found: list[Divergence] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check_whole("window", self.window, 1)
        check_number("threshold", self.threshold, 0.0, 1.0)

    def __call__(self, entry: Round) -> None:
        """Take a round into account, and warn if it brings its strategy below the threshold."""
        if entry.strategy is None or entry.strategy.split("#")[0] not in MODEL_STRATEGIES:
            return
        window = self.windows.setdefault(entry.strategy, _Window(deque(maxlen=self.window)))
        for seen in _tested(entry):
            window.add(seen)
        if len(window.seen) < self.window or window.acceptance >= self.threshold:
            window.low = window.low and window.acceptance < self.threshold
            return
        if not window.low:
            window.low = True
            causes = self._causes(window, entry)
            found = Divergence(entry.strategy, entry.row, entry.position, window.acceptance, self.window, causes)
            self.found.append(found)
            if self.warn is None:
                warnings.warn(str(found), DivergenceWarning, stacklevel=2)
            else:
                self.warn(str(found))

    def _causes(self, window: _Window, entry: Round) -> list[Cause]:
        agreement, entropy, causes = window.mean("agrees"), window.mean("entropy"), []
        if agreement is not None and agreement >= self.threshold:
            flat = "" if entropy is None else f" and the target's mean entropy is {entropy:.2f} nats"
            causes.append(
                Cause("temperature", f"the draft's best token is the target's in {agreement:.0%}{flat}: sampling costs")
            )
        causes += self._context(window, entry)
        if not causes:
            causes = [*self._tokenizer(), *self._template(), _relation(agreement)]
        return causes

    def _context(self, window: _Window, entry: Round) -> list[Cause]:
        draft = getattr(self.decoder, "draft", None)
        if draft is not None and entry.position >= draft.context:
            return [Cause("context", f"position {entry.position} is past the draft's context of {draft.context}")]
        if window.first is not None and window.first >= self.threshold and _fell(window.first, window):
            before = (
                f"{PER_TESTED} was {window.first:.2f} at first and fell as the text grew to {entry.position} tokens"
            )
            return [Cause("context", before)]
        return []

    def _tokenizer(self) -> list[Cause]:
        report = getattr(self.decoder, "report", None)
        if report is None or report.vocabulary in (None, "identical"):
            return []
        sizes = " and ".join(str(m.vocab_size) for m in report.models)
        return [Cause("tokenizer", f"the vocabularies are {report.vocabulary}, not identical (sizes {sizes})")]

    def _template(self) -> list[Cause]:
        tokenizer = getattr(self.decoder, "tokenizer", None)
        if self.chat or not getattr(tokenizer, "chat_template", None):
            return []
        return [Cause("template", "the tokenizer has a chat template and the prompts did not go through it")]


def _fell(first: float, window: _Window) -> bool:
    """Whether acceptance fell by more than two standard errors of the difference: less is what chance does."""
    error = sum(a * (1 - a) for a in (first, window.acceptance)) / len(window.seen)
    return first - window.acceptance > 2 * error**0.5


def _relation(agreement: float | None) -> Cause:
    """How far apart the models are, where nothing else explains it."""
    if agreement is None:
        return Cause("family", "nothing else fits; a trace with details would say how often the best tokens agree")
    if agreement < DISAGREE:
        return Cause("family", f"the draft's best token is the target's in {agreement:.0%}: another family or domain")
    return Cause("weak draft", f"the draft's best token is the target's in {agreement:.0%}: related, but not enough")


def _tested(r: Round) -> list[_Seen]:
    """The tokens of a round's accepted path, and the one that was rejected after it."""
    drafted = nodes(r)
    end = max((n.index for n in drafted if n.accepted), default=-1)
    rejected = [n for n in drafted if n.parent == end][:1]
    return [_seen(r, n) for n in (*(n for n in drafted if n.accepted), *rejected)]


def _seen(r: Round, node: Node) -> _Seen:
    d, column = r.details, node.parent + 1
    if d is None or column >= len(d.entropy):
        return _Seen(node.accepted, None, None)
    best = r.draft[node.index] if d.draft_top_ids is None else d.draft_top_ids[node.index][0]
    return _Seen(node.accepted, best == d.top_ids[column][0], d.entropy[column])
