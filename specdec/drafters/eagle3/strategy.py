"""eagle3: a head that reads the target's own states proposes, token by token, for all rows in one batch.

Source: EAGLE-3 (Li et al. 2025), and EAGLE-1/2 for heads of theirs. Parameters: `head`, a folder as other tools publish
it (formats.py) or an `EagleHead`; `n_max`, tokens to propose; `config`, fields of `HeadConfig` that are to have other
values than the folder says.

Cost: one pass of the head a token, and no host read: tokens and q stay on the device. q is the head's distribution
over the target's vocabulary, after the same processors as the target's; tokens without a draft id have q = 0.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.config import check_whole
from specdec.device.transfer import to_device
from specdec.drafters.base import Draft, DraftContext, Drafter, DraftRequest, Tokens, empty_like, proposal_law
from specdec.drafters.draft_model.core import Proposal, Texts, stream_of
from specdec.drafters.eagle3.formats import check_fit, load_head
from specdec.drafters.eagle3.head import EagleHead
from specdec.drafters.eagle3.rows import HeadRows
from specdec.errors import SpecdecError
from specdec.models.runner import PassOutput
from specdec.sampling.sampling import Purpose, best, race, streams


@dataclass
class Eagle3(Drafter):
    """Chains from an EAGLE head. Raises SpecdecError for bad parameters, and for a head that cannot be read."""

    head: Any = None
    n_max: int = 5
    config: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(init=False, default="eagle3")

    _head: EagleHead = field(init=False, repr=False, compare=False)
    _notes: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())
    _context: DraftContext = field(init=False, repr=False, compare=False)
    _layers: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())
    _rows: HeadRows | None = field(init=False, repr=False, compare=False, default=None)
    _before: HeadRows | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.head is None:
            raise SpecdecError("eagle3: no head was given; pass head=FOLDER (config.json and weights) or an EagleHead")
        check_whole("eagle3: n_max", self.n_max, 1)
        if isinstance(self.head, EagleHead):
            if self.config:
                raise SpecdecError("eagle3: config goes with a folder; an EagleHead has its own")
            self._head = self.head
        else:
            loaded = load_head(self.head, self.config)
            self._head, self._notes = loaded.head, loaded.notes

    def parameters(self) -> dict[str, Any]:
        """As configured, and what was said when the head was read."""
        head = type(self.head).__name__ if isinstance(self.head, EagleHead) else str(self.head)
        return {"head": head, "n_max": self.n_max, "config": dict(self.config), "notes": list(self._notes)}

    @property
    def observed_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it must see; () = all, before the target is known."""
        return self._layers

    def fresh(self, context: DraftContext) -> Eagle3:
        made = copy.copy(self)
        made._context, made._rows, made._layers = context, None, ()
        before = context.previous.get(self.name)
        made._before = before._rows if isinstance(before, Eagle3) and before._head is self._head else None
        target = context.target
        embedding = lm_head = None
        if target is not None:
            check_fit(self._head.config, target.config)
            made._layers = self._observed(target.config.num_hidden_layers)
            embedding, lm_head = context.embedding, context.head
        self._head.borrow(embedding, lm_head)
        return made

    def _observed(self, blocks: int) -> tuple[int, ...]:
        """The layers to observe in a target of so many blocks. Raises SpecdecError for what it does not show."""
        layers = self._head.config.observed_layers(blocks)
        if self._head.config.version == 3 and layers[-1] == blocks:
            raise SpecdecError(
                f"eagle3: the head observes the output of the last block ({blocks}) before the final norm, which "
                "transformers does not return; use a head that observes earlier layers"
            )
        return layers

    def close(self) -> None:
        self._rows = self._before = None

    # -- the target's states -----------------------------------------------------------------------------------------

    def observe(self, output: PassOutput) -> None:
        """Take over the observed states of a target pass."""
        assert output.hidden is not None
        config = self._head.config
        if not self._layers:
            self._layers = self._observed(len(output.hidden) - 1)
        states = output.states(self._layers)
        if states.shape[-1] != config.observed_size:
            raise SpecdecError(
                f"eagle3: the target shows {states.shape[-1]} numbers a token in the layers {list(self._layers)}, and "
                f"the head takes {config.observed_size}; use a head that was trained for this target"
            )
        if self._rows is None:
            self._make_rows(states.device, states.dtype)
        assert self._rows is not None
        with torch.no_grad():
            self._rows.observe(output, states)

    def begin(self, row: int, prompt: Tokens) -> None:
        if self._rows is None and self._before is not None:
            self._make_rows(self._before.device, self._before.dtype)
        if self._rows is not None:
            self._rows.begin(row, prompt, self._before)

    def _make_rows(self, device: torch.device, dtype: torch.dtype) -> None:
        """Rows on the target's device. A head that was read from a folder takes the target's dtype as well."""
        self._head.to(device, dtype if self._head is not self.head else None)
        self._rows = HeadRows(self._head, self._context.batch, self._context.capacity, self.n_max, device)

    # -- drafts ------------------------------------------------------------------------------------------------------

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rows = self._rows
        work = [r for r in requests if rows is not None and rows.entries(r)]
        if rows is None or not work:
            return empty_like(requests)
        with torch.no_grad():
            proposal = self._propose(rows, work, max(r.limit(self.n_max) for r in work))
        drafts = {r.row: proposal.draft(r.row, r.limit(self.n_max), self.name) for r in work}
        return [drafts.get(r.row, Draft()) for r in requests]

    def _propose(self, rows: HeadRows, requests: Sequence[DraftRequest], steps: int) -> Proposal:
        """Draft `steps` tokens in the rows of `requests`; the others ride along as padding."""
        vocab, sampling = self._context.vocab_size, requests[0].sampling
        keys, positions = [0] * rows.batch, [0] * rows.batch
        for r in requests:
            keys[r.row], positions[r.row] = stream_of(r), len(r.tokens) + 1
        key, position = to_device([keys, positions], rows.device)
        purpose = sampling.purpose if sampling is not None and sampling.drawn else Purpose.DRAFT
        texts = Texts(rows.batch, requests, rows.device)
        logits, features, held = rows.catch_up(requests)
        longest = max(rows.fed[r.row] for r in requests)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for i in range(steps):
            wide = self._head.over_target(logits, vocab, float("-inf"))
            if sampling is None or (sampling.sampling.greedy and not texts):
                token, law = best(wide)[0], None
            else:
                history = texts.history(tokens, rows.batch) if texts else None
                scores = sampling.sampling.scores(wide[:, None], history)[:, 0]
                law = proposal_law(scores) if sampling.drawn else None
                token = scores.argmax(-1) if law is None else race(law, streams(key, position + i, purpose))
            tokens.append(token)
            laws += [] if law is None else [law]
            if i + 1 < steps:
                logits, features = rows.step(token, features, held, i, longest)
        return Proposal(torch.stack(tokens, dim=1), None, torch.stack(laws, dim=1) if laws else None)
