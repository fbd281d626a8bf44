"""The prioritised chain of strategies, with llama.cpp's semantics and counters.

For every row that needs a draft the strategies are asked in order of priority; the first non-empty draft wins, and
after an empty one the next strategy is asked. Rows are served independently: one batch can carry drafts of several
strategies. After the verify pass the winner is told how many tokens were accepted, and all others that another's draft
was verified.

As upstream: `n_call_draft` counts calls and not rows; a draft is truncated to the request's n_max after the strategy
made it; the winner of a row is remembered until another strategy wins there, so that a round without a draft still
reaches the last winner's `accept`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from specdec.device.host_read import HostReader
from specdec.drafters.base import NO_DRAFT, Draft, DraftContext, Drafter, DraftRequest, Tokens, as_drafter
from specdec.errors import SpecdecError
from specdec.models.passes import ALL_LAYERS
from specdec.models.runner import PassOutput
from specdec.models.trees import check_parents
from specdec.stats import Counters

if TYPE_CHECKING:
    from specdec.drafters.length import LengthController
    from specdec.drafters.policies import PolicyLengths

UPSTREAM_ORDER = (
    "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "draft-model", "eagle3",
    "mtp", "dflash",
)  # fmt: skip


class Chain:
    """The drafters of one call, in priority order."""

    def __init__(self, drafters: Sequence[Any], reader: HostReader | None = None, separate: bool = False):
        self.drafters: list[Drafter] = [as_drafter(d) for d in drafters]
        self.separate = separate  # see DraftContext
        self.labels = chain_labels(self.drafters)
        self.by_label = dict(zip(self.labels, self.drafters, strict=True))
        self.counters = {label: Counters() for label in self.labels}
        self.observers = [d for d in self.drafters if d.observed_layers is not None]
        self.reader = reader or HostReader()
        self.winner: dict[int, int] = {}
        self.unsettled: set[int] = set()
        self.drafted: dict[int, int] = {}  # row -> tokens of its open round's draft
        self.lengths: LengthController | PolicyLengths | None = None  # if any strategy's draft length is chosen

    def begin(self, row: int, prompt: Tokens) -> None:
        """Tell every strategy that `row` starts from `prompt` (without its newest token)."""
        if self.lengths is not None:
            self.lengths.begin(row)
        if self.separate:
            self.winner.pop(row, None)
        for label, drafter in self.by_label.items():
            started = time.perf_counter()
            drafter.begin(row, prompt)
            self.counters[label].n_call_begin += 1
            self.counters[label].t_begin += time.perf_counter() - started

    def draft(self, requests: Sequence[DraftRequest], queued: int = 0) -> list[Draft]:
        """Make one draft per request, in order; empty if no strategy had one. queued: prompts that wait for a slot."""
        drafts = [NO_DRAFT] * len(requests)
        waiting = list(range(len(requests)))
        if self.lengths is not None:
            self.lengths.open(requests, queued)
            for r in requests:  # a strategy that is passed over has no round to answer for
                self.winner.pop(r.row, None)
                self.drafted.pop(r.row, None)
        for index, (label, drafter) in enumerate(self.by_label.items()):
            if not waiting:
                break
            asked = self._asked(index, {i: requests[i] for i in waiting})
            if not asked:
                continue
            counters = self.counters[label]
            started = time.perf_counter()
            proposed = _checked(label, drafter.draft(list(asked.values())), len(asked))
            _check_trees(drafter, label, proposed)
            counters.n_call_draft += 1
            if drafter.sizes_trees:
                counters.n_skipped += sum(len(draft) == 0 for draft in proposed)
            if index + 1 < len(self.drafters):
                proposed = self._resolve(proposed)
            for (i, request), draft in zip(asked.items(), proposed, strict=True):
                if self.lengths is not None:
                    draft = self.lengths.cut(index, request, draft)
                if len(draft) > 0:
                    drafts[i] = self._won(requests[i], draft, index)
            waiting = [i for i in waiting if len(drafts[i]) == 0]
            counters.t_draft += time.perf_counter() - started
        return drafts

    def _asked(self, index: int, requests: dict[int, DraftRequest]) -> dict[int, DraftRequest]:
        """Return the requests that a strategy gets: all of them, or those that automatic length gives it."""
        if self.lengths is None:
            return requests
        asked = self.lengths.ask(index, requests)
        if self.lengths.automatic[index]:
            for request in requests.values():
                self.counters[self.labels[index]].count_length(self.lengths.asked[request.row])
        return asked

    def _won(self, request: DraftRequest, draft: Draft, index: int) -> Draft:
        if request.n_max > 0:
            draft = draft.truncated(request.n_max)
        self.winner[request.row] = index
        self.unsettled.discard(request.row)
        self.drafted[request.row] = len(draft)
        if draft.length is None:
            self.counters[self.labels[index]].count_drafted(len(draft))
        else:
            self.unsettled.add(request.row)
        return replace(draft, drafter=self.labels[index])

    def _resolve(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """Fetch lengths that only the device knows, so that the next strategy can be asked after an empty draft.

        Only this costs a second host read per round; the last strategy of a chain never pays it.
        """
        lengths = [d.length for d in drafts if d.length is not None]
        if not lengths:
            return drafts
        known = iter(self.reader.read(*lengths))
        return [d if d.length is None else d.rest(0, next(known)) for d in drafts]

    @property
    def observed_layers(self) -> tuple[int, ...] | None:
        """Layers whose hidden states the strategies observe, in order; None: no strategy observes."""
        if not self.observers:
            return None
        asked = [d.observed_layers for d in self.observers]
        return (
            ALL_LAYERS if ALL_LAYERS in asked else tuple(sorted({layer for layers in asked for layer in layers or ()}))
        )

    def observe(self, output: PassOutput | None) -> None:
        """Show a target pass to the strategies that observe it."""
        if output is not None:
            for drafter in self.observers:
                drafter.observe(output)

    @property
    def can_pipeline(self) -> bool:
        """True if one strategy is alone and can start before the host knows the verdict, and so can its lengths."""
        alone = len(self.drafters) == 1 and self.drafters[0].can_pipeline
        # A draft that overlaps the verify pass goes on after all of a whole draft, which a chosen length may cut.
        return alone and (self.lengths is None or (self.lengths.can_plan and not self.drafters[0].overlapped))

    def plan(self, requests: Sequence[DraftRequest]) -> None:
        """Choose the lengths of the next drafts before the verdict on those of `requests`, where they are chosen.

        Also where nothing is then pipelined, which other rows decide about: a row's lengths must not depend on them.
        """
        if self.lengths is not None:
            self.lengths.plan(0, [r for r in requests if r.row in self.winner])

    def rests(self, requests: Sequence[DraftRequest]) -> bool:
        """True if it can be told before the verdict on this round, in which no row has a draft, that none has one in
        the next.

        requests: what would be asked then; rows near their ends ask nothing
        """
        if self.observers:  # they learn what becomes of a pass before the next one begins
            return False
        if not self.drafters or not requests:
            return True
        return self.lengths is not None and self.lengths.rests(requests)

    def rest(self, rows: Sequence[int]) -> None:
        """Count a round of rows of which `rests` was true."""
        for label in self.labels if self.lengths is not None else ():
            for _ in rows:
                self.counters[label].count_length(0)
        if self.lengths is not None:
            self.lengths.rest(rows)

    def pipeline(
        self, requests: Sequence[DraftRequest], accepted: Tensor, token: Tensor, emitted: Callable[[], Tensor]
    ) -> bool:
        """Let the strategy, if it `can_pipeline`, start the next drafts from the verdict on the device.

        accepted [B], token [B], emitted() [B, n]: the verdict, of which trees need the tokens of the path too. Returns
        True if it did.
        """
        started, drafter = time.perf_counter(), self.drafters[0]
        more: dict[str, Any] = {"emitted": emitted()} if drafter.makes_trees else {}
        if self.lengths is not None:
            planned = [self.lengths.planned.get(r.row, 0) for r in requests]
            if not all(planned):
                return False
            more["n"] = max(planned)
        is_started = drafter.pipeline(requests, accepted, token, **more)
        self.counters[self.labels[0]].t_draft += time.perf_counter() - started
        return is_started

    def settle(self, row: int, drafted: int) -> None:
        """Count a draft whose length only the device knew."""
        if row in self.unsettled:
            self.unsettled.discard(row)
            self.drafted[row] = drafted
            self.counters[self.labels[self.winner[row]]].count_drafted(drafted)

    def accept(self, row: int, n_accepted: int, path: Sequence[int] | None = None, drafted: int | None = None) -> None:
        """End a round of `row`.

        n_accepted: how many drafted tokens were accepted
        path: which nodes of a tree; None: a chain
        drafted: how much of the draft comes before the end of the text; None: all
        """
        drafted = self.drafted.get(row, 0) if drafted is None else drafted
        if self.lengths is not None:
            self.lengths.accept(row, self.winner.get(row), n_accepted, drafted)
        self.count(row, n_accepted, drafted)
        if row not in self.winner:
            return
        mine = self.winner[row]
        started = time.perf_counter()
        counters = self.counters[self.labels[mine]]
        winner = self.drafters[mine]
        if path is not None:
            for drafter in (winner, *(d for d in self.observers if d is not winner)):
                drafter.accept_path(row, path)
        winner.accept(row, n_accepted, False)
        counters.n_call_accept += 1
        counters.t_accept += time.perf_counter() - started
        for index, drafter in enumerate(self.drafters):
            if index != mine:
                drafter.accept(row, n_accepted, True)

    def count(self, row: int, n_accepted: int, drafted: int) -> None:
        """Count what was accepted of the row's open draft, if it has one.

        What was drafted after the end of the text was counted when it was made, and is taken back.
        """
        known = self.drafted.pop(row, None)
        if known is None or row in self.unsettled:
            self.unsettled.discard(row)
            return
        counters = self.counters[self.labels[self.winner[row]]]
        counters.count_accepted(n_accepted)
        counters.n_gen_tokens -= known - drafted
        counters.n_gen_drafts -= drafted == 0

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()


def _checked(label: str, proposed: Any, expected: int) -> Sequence[Draft]:
    """Return a strategy's drafts. Raises SpecdecError if they break the protocol."""
    if not isinstance(proposed, Sequence) or len(proposed) != expected:
        got = f"{len(proposed)} drafts" if isinstance(proposed, Sequence) else type(proposed).__name__
        raise SpecdecError(f"strategy {label!r} returned {got} for {expected} requests")
    for draft in proposed:
        if not isinstance(draft, Draft):
            raise SpecdecError(f"strategy {label!r} returned {type(draft).__name__} where a Draft belongs")
        tokens = draft.tokens
        if isinstance(tokens, Tensor):
            sound = tokens.dim() == 1 and not tokens.is_floating_point()
        else:
            sound = isinstance(tokens, Sequence | np.ndarray) and all(isinstance(t, Integral) for t in tokens)
        if not sound:
            raise SpecdecError(f"strategy {label!r} proposed something other than a row of token ids")
        if draft.q is not None and not (isinstance(draft.q, Tensor) and draft.q.is_floating_point()):
            raise SpecdecError(f"strategy {label!r} gave a q that is no tensor of floats: {type(draft.q).__name__}")
        if draft.q is not None and (draft.q.dim() != 2 or len(draft.q) != len(tokens)):
            shape = tuple(draft.q.shape)
            raise SpecdecError(f"strategy {label!r} proposed {len(tokens)} tokens with a q of shape {shape}")
    return proposed


def _check_trees(drafter: Any, label: str, drafts: Sequence[Draft]) -> None:
    """Raise SpecdecError for parents that are no tree, and for trees of a strategy without `makes_trees`."""
    for draft in drafts:
        if draft.parents is None:
            continue
        if not drafter.makes_trees:
            raise SpecdecError(f"strategy {label!r} proposed a tree, but its makes_trees is not True")
        if draft.length is not None:
            raise SpecdecError(f"strategy {label!r} proposed a tree whose length only the device knows")
        if not isinstance(draft.parents, Tensor):
            check_parents(draft.parents, len(draft), label)
        elif draft.parents.shape != (len(draft),) or draft.levels < 1:
            raise SpecdecError(
                f"strategy {label!r} proposed {len(draft)} tokens with parents of shape {tuple(draft.parents.shape)} "
                f"and levels={draft.levels}: give one parent per token, and how many levels the tree may have"
            )


def chain_labels(drafters: Sequence[Drafter]) -> list[str]:
    """Make names unique: a second strategy of one name becomes `name#2`."""
    labels: list[str] = []
    for drafter in drafters:
        seen = sum(label.split("#")[0] == drafter.name for label in labels)
        labels.append(drafter.name if seen == 0 else f"{drafter.name}#{seen + 1}")
    return labels


def upstream_order(drafters: Sequence[Any]) -> list[Any]:
    """Sort as llama.cpp builds its chain; strategies it does not know keep their order, at the end."""

    def rank(drafter: Any) -> int:
        return UPSTREAM_ORDER.index(drafter.name) if drafter.name in UPSTREAM_ORDER else len(UPSTREAM_ORDER)

    return sorted(drafters, key=rank)


def build_chain(drafters: Sequence[Any], context: DraftContext) -> Chain:
    """Make a chain of fresh drafters for one call."""
    fresh = [as_drafter(d).fresh(context) for d in drafters]
    return Chain(fresh, context.reader, context.separate)
