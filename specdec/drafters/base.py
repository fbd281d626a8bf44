"""The drafter protocol: the one seam that everything that proposes tokens hangs on.

A drafter sees rows by number (the slot of a row in the batch), proposes for all rows that still need a draft in one
call, and is told what was accepted. What it returns is data, a `Draft`.

Losslessness asks one thing of a drafter whose draft has q (the distribution its tokens were sampled from): whether
position i is proposed may depend on the tokens before it and on q_i, never on the sampled token x_i or anything later.
A draft with `q=None` makes no claim, and is lossless whatever it proposes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.models.passes import ALL_LAYERS
from specdec.models.trees import depths_of
from specdec.sampling.sampling import Purpose, Sampling

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedTokenizerBase

    from specdec.device.host_read import HostReader
    from specdec.models.kv_cache import RaggedCache
    from specdec.models.runner import PassOutput, Runner

Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class RowNoise:
    """Keys of a row's random numbers. `key` is the row's, for noise shared with the target; `round_key` changes every
    round, so that a redrafted position gets fresh noise under leviathan."""

    key: int
    round_key: int


@dataclass(frozen=True)
class RowSampling:
    """How the target will be sampled in this row, so that a drafter's q is comparable with p.

    proposal: "argmax", "sample" or "coupled" (what the acceptance rule wants of model drafters); processors: the row's
    text-reading processors or None.
    """

    sampling: Sampling
    proposal: str
    processors: LogitsProcessorList | None = None

    @property
    def drawn(self) -> bool:
        """Whether proposals are drawn from q; else they are its argmax."""
        return self.proposal != "argmax" and not self.sampling.greedy

    @property
    def purpose(self) -> Purpose:
        """Of the draws: the target's own under coupled."""
        return Purpose.SAMPLE if self.proposal == "coupled" else Purpose.DRAFT

    def streams(self, noise: RowNoise) -> tuple[int, Purpose]:
        """The key and the purpose of the draws: the target's own under coupled, fresh in every round otherwise."""
        return noise.key if self.proposal == "coupled" else noise.round_key, self.purpose


@dataclass(frozen=True)
class DraftRequest:
    """One row that needs a draft.

    row: slot number; tokens: the row's ids without the newest; last: the newest id; n_max: most tokens to propose
    (<= 0: no limit); position: sequence index of `last` (= len(tokens)); sampling and noise: for drafters that sample.
    """

    row: int
    tokens: Tokens
    last: int
    n_max: int = 0
    position: int = -1
    sampling: RowSampling | None = None
    noise: RowNoise | None = None

    def limit(self, own: int) -> int:
        """Most tokens to propose for a strategy whose own limit is `own`."""
        return own if self.n_max <= 0 else min(own, self.n_max)

    def up_to(self, n: int) -> DraftRequest:
        """The same with another n_max."""
        # Spelt out: dataclasses.replace is slow enough to be seen in rounds of many rows.
        return DraftRequest(self.row, self.tokens, self.last, n, self.position, self.sampling, self.noise)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a chain, or a tree of nodes.

    tokens [k]: ids, a list or an int64 tensor on any device (there a node of a tree can be `trees.MISSING`: its
        parent's distribution had no token for it, and it counts for nothing)
    parents [k]: None for a chain; for a tree the node that each node follows (-1: the row's newest token), parents
        before children and siblings in order of proposal; a list, or an int64 tensor with `levels` and `siblings`
    q [k, V]: float32 over the target's vocabulary, the distribution each token was really sampled from, or None: no
        claim (of siblings sampled without replacement: the distribution without the earlier ones, renormalised; all
        zero = not sampled, the node only fills its place)
    drafter: the strategy's name
    length: a 0-d int64 tensor where only the device knows how many of `tokens` a chain proposes
    levels, siblings: of a tree whose parents are on the device: no more levels, no more children of a node
    """

    tokens: Sequence[int] | Tensor = ()
    parents: Sequence[int] | Tensor | None = None
    q: Tensor | None = None
    drafter: str = ""
    length: Tensor | None = None
    levels: int = 0
    siblings: int = 0

    def __len__(self) -> int:
        # A tensor's own len() is slow enough to be seen in rounds of many rows.
        return self.tokens.shape[0] if isinstance(self.tokens, Tensor) else len(self.tokens)

    def truncated(self, n_max: int) -> Draft:
        """The first `n_max` tokens; of a tree, the nodes before the first that is deeper than `n_max` (of one on the
        device, no level below `n_max` will be accepted)."""
        if isinstance(self.parents, Tensor):
            return replace(self, levels=min(self.levels, n_max))
        if self.parents is not None:
            deeper = [node for node, depth in enumerate(depths_of(self.parents)) if depth > n_max]
            return self.first(deeper[0]) if deeper else self
        return self.first(n_max)

    def first(self, n: int) -> Draft:
        """The first `n` tokens or nodes. The cut is one of places, never of what was sampled there."""
        if len(self) <= n:
            return self
        length = None if self.length is None else self.length.clamp(max=n)
        q = None if self.q is None else self.q[:n]
        parents = None if self.parents is None else self.parents[:n]
        return replace(self, tokens=self.tokens[:n], parents=parents, q=q, length=length)

    def rest(self, start: int, actual: int) -> Draft:
        """What is left of a chain after `start` of `actual` proposed tokens have been accepted."""
        q = None if self.q is None else self.q[start:actual]
        return Draft(self.tokens[start:actual], None, q, self.drafter)


@dataclass
class DraftContext:
    """What a call offers its drafters.

    batch: slots of the call
    capacity: most tokens a row can reach
    vocab_size: the target's
    draft_runner, tokenizer, draft_tokenizer: of the decoder, None where it has none
    reader: how values come back from the device
    previous: drafters of the call before by their labels, under `keep_state` (else empty)
    nodes: most nodes of a tree that are verified
    separate: what a drafter knows of a row ends with it, so that a row's drafts (and under leviathan its text) do not
        depend on who had its slot before; off, a slot's rows follow one another as in llama.cpp
    target, cache: the target's runner and cache, for drafters that use its layers, states, embeddings or head
    """

    batch: int
    capacity: int
    vocab_size: int
    draft_runner: Runner | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    reader: HostReader | None = None
    previous: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 15
    separate: bool = False
    target: Runner | None = None
    cache: RaggedCache | None = None

    @property
    def embedding(self) -> Any:
        """The target's input embeddings, a module: ids [...] -> [..., H]."""
        assert self.target is not None
        return self.target.view.model.get_input_embeddings()

    @property
    def head(self) -> Any:
        """The target's output head, a module: states after the final norm [..., H] -> logits [..., V]."""
        assert self.target is not None
        return self.target.view.model.get_output_embeddings()


@dataclass
class Drafter:
    """Base of everything that proposes tokens, with a default for all but `draft`.

    A drafter of one's own needs a `name` and `draft`; parameters are dataclass fields, and what a call learns belongs
    to the copy that `fresh` makes, so that calls never share state. The properties say how the engine must treat a
    strategy; a class attribute in their place will do. Objects that are no subclass serve as well, if they have name,
    begin, draft and accept (`as_drafter`).
    """

    name: str = field(init=False, default="")

    # -- what every strategy has -----------------------------------------------------------------------------------

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Propose one draft per request, in order; an empty one where there is nothing to propose."""
        raise NotImplementedError(f"strategy {self.name!r} has no draft(requests)")

    def begin(self, row: int, prompt: Tokens) -> None:
        """A row starts, or continues, from `prompt` (without its newest token). What a drafter keeps beyond this makes
        rows depend on each other."""

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        """The row's round ended: `n_accepted` tokens of the draft were accepted; `is_other`: another strategy's."""

    # -- how the engine must treat it --------------------------------------------------------------------------------

    @property
    def makes_trees(self) -> bool:
        """Drafts can be trees."""
        return False

    @property
    def tree_nodes(self) -> int:
        """Most nodes of its trees, where that is more than a verify pass usually takes; 0: it is not."""
        return 0

    @property
    def observed_layers(self) -> tuple[int, ...] | None:
        """Hidden states it must see of every target pass, prompts included: 0 = the embedding's output, i = after block
        i, `ALL_LAYERS` = all; () = logits and tokens alone, None = nothing. They arrive by `observe`."""
        return None

    @property
    def uses_draft_model(self) -> bool:
        """It drafts with the decoder's draft model."""
        return False

    @property
    def runs_a_model(self) -> bool:
        """Drafting costs passes of some model; otherwise it costs the host next to nothing, and has no q."""
        return True

    @property
    def automatic(self) -> bool:
        """The user left the draft length open, so that the call chooses it."""
        return False

    @property
    def can_pipeline(self) -> bool:
        """The next draft can start before the host has read the verdict (`pipeline`)."""
        return False

    @property
    def shares_state(self) -> bool:
        """Rows draft from what other rows left, so that under leviathan a row's text depends on them."""
        return False

    # -- what some have ----------------------------------------------------------------------------------------------

    def accept_path(self, row: int, nodes: Sequence[int]) -> None:
        """Of a tree: the accepted nodes, from the first level on. Called before `accept`. A strategy that observes the
        target hears it of every strategy's trees: their nodes were verified side by side."""

    def observe(self, output: PassOutput) -> None:
        """See a target pass, if the strategy has `observed_layers`."""

    def pipeline(self, requests: Sequence[DraftRequest], accepted: Tensor, token: Tensor) -> bool:
        """Start the drafts that follow those being verified, by the verdict on the device: accepted [B], token [B].
        Returns whether anything was started."""
        return False

    def fresh(self, context: DraftContext) -> Any:
        """A drafter with these parameters and no state, for one call."""
        return copy.copy(self)

    def cost(self) -> tuple[int, float]:
        """(passes of a model, seconds of its prefill) that drafting has taken in this call."""
        return 0, 0.0

    def close(self) -> None:
        """End the call."""

    def parameters(self) -> dict[str, Any]:
        """The configured parameters, for provenance."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_") and k != "name"}

    def inherited(self, context: DraftContext) -> Any:
        """The drafter of the call before whose state this one may go on with: same strategy, same parameters."""
        alike = (d for d in context.previous.values() if type(d) is type(self))
        return next((d for d in alike if d.parameters() == self.parameters()), None)


BaseDrafter = Drafter  # its name until version 0.1


PROTOCOL = ("name", "begin", "draft", "accept")


def is_drafter(made: Any) -> bool:
    """Whether an object has the drafter protocol."""
    return isinstance(made, Drafter) or all(hasattr(made, name) for name in PROTOCOL)


def as_drafter(made: Any) -> Any:
    """An object with the drafter protocol as a `Drafter`: it gets the defaults for all that it lacks."""
    if isinstance(made, Drafter):
        return made
    known = {name: getattr(made, name) for name in dir(Drafter) if name[0] != "_" and hasattr(made, name)}
    if "observe" in known:
        known.setdefault("observed_layers", ALL_LAYERS)
    if "fresh" in known:
        known["fresh"] = lambda context: as_drafter(made.fresh(context))
    else:
        known["fresh"] = lambda context: adapted
    adapted: Drafter
    methods = {name: staticmethod(value) if callable(value) else value for name, value in known.items()}
    adapted = type(type(made).__name__, (Drafter,), {"name": made.name, **methods})()
    adapted.name = made.name
    return adapted


@dataclass
class RowDrafter(Drafter):
    """Drafters that read nothing but ids and serve each row on its own, without a q."""

    @property
    def runs_a_model(self) -> bool:
        return False

    @property
    def shares_state(self) -> bool:
        return bool(getattr(self, "shared", False))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(self._propose(r), drafter=self.name) for r in requests]

    def _propose(self, request: DraftRequest) -> list[int]:
        """The ids to propose for one row."""
        raise NotImplementedError


def as_array(tokens: Tokens) -> np.ndarray:
    """Token ids as int64 [n], without a copy where they already are."""
    return np.asarray(tokens, dtype=np.int64)


def suffix_matches(text: np.ndarray, pattern: np.ndarray) -> tuple[np.ndarray, int]:
    """Where the longest possible suffix of `pattern` occurs in `text`.

    Returns (ends, n): ascending exclusive end indices of the occurrences, and the length n of the matched suffix
    (0 and no ends when not even the last token occurs). Costs a scan for the last token, then only its hits.
    """
    ends = np.flatnonzero(text == pattern[-1]) if len(pattern) else np.empty(0, dtype=np.int64)
    n = 0 if len(ends) == 0 else 1
    while 0 < n < len(pattern):
        candidates = ends[ends >= n]
        longer = candidates[text[candidates - n] == pattern[-1 - n]]
        if len(longer) == 0:
            break
        ends, n = longer, n + 1
    return ends + 1, n


NO_DRAFT = Draft()


def empty_like(requests: Sequence[DraftRequest]) -> list[Draft]:
    return [Draft() for _ in requests]


def pad_vocabulary(logits: Tensor, vocab_size: int, excluded: Tensor | None = None) -> Tensor:
    """Draft logits [..., V_draft] over the target's vocabulary [..., vocab_size].

    Ids that the target lacks, and `excluded` [n] that mean another text to it, are removed *before* anything is
    sampled; ids that the draft lacks get probability 0: cutting a draft at a sampled token instead would change the
    output's law.
    """
    if excluded is not None:
        logits = logits.index_fill(-1, excluded, float("-inf"))
    width = logits.shape[-1]
    if width >= vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - width), value=float("-inf"))


def proposal_law(scores: Tensor) -> Tensor:
    """q [..., V] from scores. Where the draft is broken (NaN, +inf or nothing but -inf) id 0 is all that is proposed,
    and q says so: a claim that holds, and a token that costs acceptance and no more."""
    sound = scores.amax(dim=-1, keepdim=True).isfinite()
    first = torch.arange(scores.shape[-1], device=scores.device) == 0
    return torch.softmax(torch.where(sound, scores, torch.where(first, 0.0, float("-inf"))), dim=-1)
