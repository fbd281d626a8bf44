"""The drafter protocol, which everything that proposes tokens follows.

A drafter sees rows by number (the slot of a row in the batch), proposes for all rows that still need a draft in one
call, and is told what was accepted. It returns data, a `Draft`.

A draft with q (the distribution its tokens were sampled from) is lossless under one condition: the choice to propose
position i may depend on the tokens before it and on q_i, never on the sampled token x_i or anything later. A draft with
`q=None` is always lossless.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.models.passes import ALL_LAYERS, WIDEST
from specdec.models.trees import depths_of
from specdec.sampling.sampling import Purpose, Sampling
from specdec.sampling.texts import Drafted, Known, KnownTexts

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedTokenizerBase

    from specdec.device.host_read import HostReader
    from specdec.drafters.costs import CostTable
    from specdec.models.kv_cache import RaggedCache
    from specdec.models.runner import PassOutput, Runner, Shapes

Tokens = Sequence[int] | np.ndarray
MOST_NODES = WIDEST - 1  # of a tree: the newest token is fed as well
COUPLED = ("coupled", "coupled-independent")  # proposals that are sampled with the target's own random numbers


@dataclass(frozen=True)
class RowNoise:
    """Keys of a row's random numbers.

    key: the row's, for noise shared with the target
    round_key: changes every round, so that a redrafted position gets fresh noise under leviathan
    """

    key: int
    round_key: int


@dataclass(frozen=True)
class RowSampling:
    """How the target is sampled in a row, so that a drafter's q is comparable with p.

    sampling: the call's pipeline from logits to scores
    proposal: what the acceptance rule wants of model drafters (`AcceptanceRule.proposal`)
    processors: the row's text-reading processors, or None
    texts: the known texts of all rows, for these processors, or None
    """

    sampling: Sampling
    proposal: str
    processors: LogitsProcessorList | None = None
    texts: KnownTexts | None = None

    @property
    def signature(self) -> Any:
        """Equal if the same is computed from equal inputs; None if that cannot be told, so that nothing is recorded."""
        return self.sampling.signature_with(self.texts)

    def known(self, columns: int, device: torch.device) -> Known | None:
        """Return the first ids of all rows, for recorded functions; None: no processor reads texts."""
        return None if self.texts is None else self.texts.known(columns, device)

    def drafted(self, known: Known | None, lengths: Tensor, requests: Sequence[DraftRequest]) -> Drafted | None:
        """Return the texts of rows whose chains begin; None: no processor reads them.

        lengths [B]: known ids of each row
        requests: of these rows; looked at only where processors are called on the host
        """
        if self.texts is None or known is None:
            return None
        return Drafted(self.texts, known, lengths, {r.row: r.known for r in requests})

    @property
    def sampled(self) -> bool:
        """True if proposals are sampled from q; else they are its argmax."""
        return self.proposal != "argmax" and not self.sampling.greedy

    @property
    def drawn(self) -> bool:
        """`sampled`, by its name until version 0.1."""
        return self.sampled

    @property
    def independent(self) -> bool:
        """True if siblings are independent samples of q; else they are sampled without replacement."""
        return self.proposal in ("independent", "coupled-independent")

    @property
    def purpose(self) -> Purpose:
        """Purpose of the proposals' random numbers: the target's own under coupled proposals."""
        return Purpose.SAMPLE if self.proposal in COUPLED else Purpose.DRAFT

    def streams(self, noise: RowNoise) -> tuple[int, Purpose]:
        """Return key and purpose of the proposals' random numbers: the target's if coupled, else new every round."""
        return noise.key if self.proposal in COUPLED else noise.round_key, self.purpose


@dataclass(frozen=True)
class DraftRequest:
    """One row that needs a draft.

    row: slot number
    tokens: the row's ids without the newest
    last: the newest id
    n_max: most tokens to propose; <= 0: no limit
    position: sequence index of `last` (= len(tokens))
    sampling, noise: for drafters that sample
    """

    row: int
    tokens: Tokens
    last: int
    n_max: int = 0
    position: int = -1
    sampling: RowSampling | None = None
    noise: RowNoise | None = None

    @property
    def known(self) -> int:
        """How many of the target's ids are known, the newest included."""
        return 1 + (len(self.tokens) if self.position < 0 else self.position)

    def limit(self, own: int) -> int:
        """Return the most tokens to propose for a strategy whose own limit is `own`."""
        return own if self.n_max <= 0 else min(own, self.n_max)

    def up_to(self, n: int) -> DraftRequest:
        """Return the same request with another n_max."""
        # Spelt out: dataclasses.replace is slow enough to show in rounds of many rows.
        return DraftRequest(self.row, self.tokens, self.last, n, self.position, self.sampling, self.noise)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a chain, or a tree of nodes.

    tokens [k]: ids, a list or an int64 tensor on any device; in a tensor a node of a tree can be `trees.MISSING`: its
        parent's distribution had no token for it, and it does not count
    parents [k]: for a tree the node that each node follows, -1 = the row's newest token, parents before children and
        siblings in order of proposal; a list, or an int64 tensor with `levels` and `siblings`; None: a chain
    q [k, V]: float32 over the target's vocabulary, the distribution that each token was really sampled from; for
        siblings sampled without replacement it lacks the earlier ones, renormalised; a row of zeros = the node was not
        sampled and only fills its place; None: no token was sampled
    drafter: the strategy's name
    length: a 0-d int64 tensor if only the device knows how many of `tokens` a chain proposes
    levels, siblings: bounds of levels and of children per node, if the parents are on the device
    states [k + 1, H], layers: what the target's first `layers` layers made of the newest token and of each of `tokens`,
        whose keys and values of these layers are in its cache: the verify pass may go on from there; None: unknown
    """

    tokens: Sequence[int] | Tensor = ()
    parents: Sequence[int] | Tensor | None = None
    q: Tensor | None = None
    drafter: str = ""
    length: Tensor | None = None
    levels: int = 0
    siblings: int = 0
    states: Tensor | None = None
    layers: int = 0

    def __len__(self) -> int:
        # A tensor's own len() is slow enough to show in rounds of many rows.
        return self.tokens.shape[0] if isinstance(self.tokens, Tensor) else len(self.tokens)

    def truncated(self, n_max: int) -> Draft:
        """Return the first `n_max` tokens of a chain; for a tree the nodes before the first that is deeper.

        Levels of a tree on the device are limited instead: none deeper than `n_max` is accepted.
        """
        if isinstance(self.parents, Tensor):
            return replace(self, levels=min(self.levels, n_max))
        if self.parents is not None:
            deeper = [node for node, depth in enumerate(depths_of(self.parents)) if depth > n_max]
            return self.first(deeper[0]) if deeper else self
        return self.first(n_max)

    def first(self, n: int) -> Draft:
        """Return the first `n` tokens or nodes. The cut depends on places, never on sampled tokens."""
        if len(self) <= n:
            return self
        length = None if self.length is None else self.length.clamp(max=n)
        q = None if self.q is None else self.q[:n]
        parents = None if self.parents is None else self.parents[:n]
        return replace(self, tokens=self.tokens[:n], parents=parents, q=q, length=length)

    def rest(self, start: int, actual: int) -> Draft:
        """Return what is left of a chain after `start` of `actual` proposed tokens were accepted."""
        q = None if self.q is None else self.q[start:actual]
        return Draft(self.tokens[start:actual], None, q, self.drafter)


@dataclass
class DraftContext:
    """What a call offers its drafters.

    batch: slots of the call
    capacity: most tokens a row can reach
    vocab_size: the target's
    draft_runner, tokenizer, draft_tokenizer: the decoder's; None if it has none
    reader: how values come back from the device
    previous: drafters of the previous call by their labels, under `keep_state`; else empty
    nodes: most nodes of a tree that are verified
    separate: what a drafter knows of a row ends with it, so that a row's drafts (and under leviathan its text) do not
        depend on earlier rows in its slot; False: a slot's rows follow one another as in llama.cpp
    target, cache: the target's runner and cache, for drafters that use its layers, states, embeddings or head
    costs, shapes: what passes cost, if a strategy chooses tree sizes (`sizes_trees`), and the passes that there are
    keeps_text: the text is plain decoding's, whatever is drafted
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
    costs: CostTable | None = None
    shapes: Shapes | None = None
    keeps_text: bool = False

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

    Your own drafter needs a `name` and `draft`; parameters are dataclass fields, and what a call learns belongs to the
    copy that `fresh` makes, so that calls never share state. The properties say how the engine must treat a strategy;
    class attributes will do in their place. Other objects serve as well, if they have name, begin, draft and accept
    (`as_drafter`).
    """

    name: str = field(init=False, default="")
    # What to look at where hardly anything that it proposes is accepted.
    likely_causes = (
        "Look at the pair (one tokenizer and vocabulary, a chat template that both were trained with), at the draft "
        "(the right checkpoint, trained, in a dtype that keeps it whole) and at the temperature; "
        "specdec.research.traces.monitor tells causes apart."
    )

    # -- what every strategy has -----------------------------------------------------------------------------------

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Propose one draft per request, in order; an empty one if there is nothing to propose."""
        raise NotImplementedError(f"strategy {self.name!r} has no draft(requests)")

    def begin(self, row: int, prompt: Tokens) -> None:
        """Start a row, or continue it, from `prompt` (without its newest token). What a drafter keeps longer makes rows
        depend on each other."""

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        """Learn that the row's round ended with `n_accepted` tokens of the draft accepted; is_other: of another's."""

    # -- how the engine must treat it --------------------------------------------------------------------------------

    @property
    def makes_trees(self) -> bool:
        """True if drafts can be trees."""
        return False

    @property
    def tree_nodes(self) -> int:
        """Most nodes of its trees, if more than a verify pass usually takes; else 0."""
        return 0

    @property
    def sizes_trees(self) -> bool:
        """True if it chooses how large its trees are from the cost table of the call."""
        return False

    @property
    def observed_layers(self) -> tuple[int, ...] | None:
        """Layers whose hidden states it sees in every target pass, prompts included, through `observe`.

        0 = the embedding's output, i = after block i, `ALL_LAYERS` = all; () = logits and tokens alone; None = nothing
        """
        return None

    @property
    def uses_draft_model(self) -> bool:
        """True if it drafts with the decoder's draft model."""
        return False

    @property
    def runs_a_model(self) -> bool:
        """True if drafting costs passes of some model; otherwise it costs the host next to nothing, and has no q."""
        return True

    @property
    def step_share(self) -> float:
        """Part of a plain target pass that a draft step takes, if it runs a model other than the draft model."""
        return 0.1

    def stop_by(self, rule: Any, levels: Mapping[int, float]) -> None:
        """End drafts by a length policy's rule (draft_model/steps.py `StopRule`); levels: row -> threshold, kept up to
        date by the policy. Raises SpecdecError if the strategy has no draft steps that it could end."""
        raise SpecdecError(
            f"strategy {self.name!r} has no draft steps that length_policy could end: choose one that looks at the "
            "past alone, such as heuristic, goodput or auto"
        )

    def steps(self, k: int) -> int:
        """Return the passes that are run to draft k tokens."""
        return k

    @property
    def automatic(self) -> bool:
        """True if the user left the draft length open: the call chooses it."""
        return False

    @property
    def can_pipeline(self) -> bool:
        """True if the next draft can start before the host has read the verdict (`pipeline`)."""
        return False

    @property
    def shares_state(self) -> bool:
        """True if rows draft from what other rows left: under leviathan a row's text then depends on them."""
        return False

    # -- what some have ----------------------------------------------------------------------------------------------

    def accept_path(self, row: int, nodes: Sequence[int]) -> None:
        """Learn the accepted nodes of a tree, from the first level on. Called before `accept`.

        A strategy that observes the target is told of every strategy's trees, whose nodes it saw verified.
        """

    def observe(self, output: PassOutput) -> None:
        """See a target pass, if the strategy has `observed_layers`."""

    def pipeline(self, requests: Sequence[DraftRequest], accepted: Tensor, token: Tensor, n: int | None = None) -> bool:
        """Start the next drafts from the verdict on the device: accepted [B], token [B]. Returns True if it did.

        n: tokens of the longest; None = the strategy's own length
        """
        return False

    def fresh(self, context: DraftContext) -> Any:
        """Make a drafter with these parameters and no state, for one call."""
        return copy.copy(self)

    def cost(self) -> tuple[int, float]:
        """Return (passes of a model, seconds of its prefill) that drafting has taken in this call."""
        return 0, 0.0

    @property
    def overlapped(self) -> dict[str, int]:
        """Return how many drafts were made on a guess at the target's token, and how many guesses were right."""
        return {}

    def close(self) -> None:
        """End the call."""

    def parameters(self) -> dict[str, Any]:
        """Return the configured parameters, for provenance."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_") and k != "name"}

    def inherited(self, context: DraftContext) -> Any:
        """Find the drafter of the previous call whose state this one may take: same strategy, same parameters."""
        alike = (d for d in context.previous.values() if type(d) is type(self))
        return next((d for d in alike if d.parameters() == self.parameters()), None)


BaseDrafter = Drafter  # its name until version 0.1


PROTOCOL = ("name", "begin", "draft", "accept")


def is_drafter(made: Any) -> bool:
    """True if an object has the drafter protocol."""
    return isinstance(made, Drafter) or all(hasattr(made, name) for name in PROTOCOL)


def as_drafter(made: Any) -> Any:
    """Make a `Drafter` of an object with the drafter protocol: it gets the defaults for all that it lacks."""
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
    own = {"name": made.name, "__module__": type(made).__module__}
    adapted = type(type(made).__name__, (Drafter,), {**own, **methods})()
    adapted.name = made.name
    return adapted


@dataclass
class RowDrafter(Drafter):
    """Base of drafters that read ids only and serve each row on its own, without q."""

    @property
    def runs_a_model(self) -> bool:
        return False

    @property
    def shares_state(self) -> bool:
        return bool(getattr(self, "shared", False))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(self._propose(r), drafter=self.name) for r in requests]

    def _propose(self, request: DraftRequest) -> list[int]:
        """Return the ids to propose for one row."""
        raise NotImplementedError


def as_array(tokens: Tokens) -> np.ndarray:
    """Return token ids as int64 [n], without a copy if they already are."""
    return np.asarray(tokens, dtype=np.int64)


def suffix_matches(text: np.ndarray, pattern: np.ndarray) -> tuple[np.ndarray, int]:
    """Find where the longest possible suffix of `pattern` occurs in `text`.

    Returns (ends, n): ascending exclusive end indices of the occurrences, and the length n of the matched suffix
    (0 and no ends if not even the last token occurs). Costs a scan for the last token, then only its hits.
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
    """Make an empty draft per request."""
    return [Draft() for _ in requests]


def pad_vocabulary(logits: Tensor, vocab_size: int, excluded: Tensor | None = None) -> Tensor:
    """Map draft logits [..., V_draft] to the target's vocabulary [..., vocab_size].

    Ids that the target lacks, and `excluded` [n] that mean another text to it, are removed *before* anything is
    sampled, and ids that the draft lacks get probability 0: cutting a draft at a sampled token would change the
    distribution of the output.
    """
    if excluded is not None:
        logits = logits.index_fill(-1, excluded, float("-inf"))
    width = logits.shape[-1]
    if width >= vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - width), value=float("-inf"))


def proposal_distribution(scores: Tensor) -> Tensor:
    """Compute q [..., V] from scores [..., V].

    If the draft is broken (NaN, +inf or nothing but -inf), q is all on id 0: a true q, which costs acceptance only.
    """
    sound = scores.amax(dim=-1, keepdim=True).isfinite()
    first = torch.arange(scores.shape[-1], device=scores.device) == 0
    return torch.softmax(torch.where(sound, scores, torch.where(first, 0.0, float("-inf"))), dim=-1)
