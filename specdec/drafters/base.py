"""The drafter protocol, which everything that proposes tokens follows.

A drafter sees rows by number (the slot of a row in the batch), proposes for all rows that still need a draft in one
call, and is told what was accepted. It returns data, a `Draft` (draft.py, which also says what is lossless).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.drafters.draft import (  # noqa: F401 - what drafters are made of can be imported from here
    COUPLED,
    NO_DRAFT,
    Draft,
    DraftRequest,
    RowNoise,
    RowSampling,
    Tokens,
    as_array,
    empty_like,
    pad_vocabulary,
    proposal_distribution,
)  # fmt: skip
from specdec.drafters.options import check_effects, check_options, state
from specdec.errors import SpecdecError
from specdec.files.fields import WIDEST
from specdec.models.passes import ALL_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec.device.host_read import HostReader
    from specdec.drafters.costs import CostTable
    from specdec.models.kv_cache import RaggedCache
    from specdec.models.runner import PassOutput, Runner, Shapes

MOST_NODES = WIDEST - 1  # of a tree: the newest token is fed as well


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

    def target_of(self, strategy: str) -> Runner:
        """Return the target's runner. Raises SpecdecError if there is none."""
        if self.target is None:
            raise SpecdecError(f"{strategy} drafts with what a target computes: use it in a SpeculativeDecoder")
        return self.target

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


def trait(default: Any) -> Any:
    """Declare what subclasses may set, or compute in a property."""
    return default


@dataclass
class Drafter:
    """Base of everything that proposes tokens, with a default for all but `draft`.

    Your own drafter needs a `name` and `draft`; parameters are dataclass fields, with their bounds if you like
    (options.py), and what a call learns belongs to the copy that `fresh` makes, so that calls never share state. Other
    objects serve as well, if they have name, begin, draft and accept (`as_drafter`).
    """

    name: str = field(init=False, default="")
    # What to look at where hardly anything that it proposes is accepted.
    likely_causes = (
        "Look at the pair (one tokenizer and vocabulary, a chat template that both were trained with), at the draft "
        "(the right checkpoint, trained, in a dtype that keeps it whole) and at the temperature; "
        "specdec.research.traces.monitor tells causes apart."
    )

    def __post_init__(self) -> None:
        """Check the parameters whose bounds are declared: SpecdecError; warn of those that have no effect."""
        check_options(self)
        check_effects(self, strict=False)

    # -- what every strategy has -----------------------------------------------------------------------------------

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Propose one draft per request, in order; an empty one if there is nothing to propose."""
        raise NotImplementedError(f"strategy {self.name!r} has no draft(requests)")

    def begin(self, row: int, prompt: Tokens) -> None:
        """Start a row, or continue it, from `prompt` (without its newest token). What a drafter keeps longer makes rows
        depend on each other."""

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        """Learn that the row's round ended with `n_accepted` tokens of the draft accepted; is_other: of another's."""

    # -- how the engine must treat it; where that depends on parameters, make it a property ---------------------------

    makes_trees = trait(False)  # drafts can be trees
    tree_nodes = trait(0)  # most nodes of its trees, if more than a verify pass usually takes
    sizes_trees = trait(False)  # it chooses how large its trees are from the cost table of the call
    # Layers whose hidden states it sees in every target pass, prompts included, through `observe`: 0 = the embedding's
    # output, i = after block i, `ALL_LAYERS` = all; () = logits and tokens alone; None = nothing.
    observed_layers = trait(None)
    uses_draft_model = trait(False)  # it drafts with the decoder's draft model
    runs_a_model = trait(True)  # drafting costs passes of a model; otherwise next to nothing, and there is no q
    step_share = trait(0.1)  # of a plain target pass, that a step of a model other than the draft model takes
    automatic = trait(False)  # the user left the draft length open: the call chooses it
    can_pipeline = trait(False)  # the next draft can start before the host has read the verdict (`pipeline`)
    shares_state = trait(False)  # rows draft from what others left, so under leviathan a text depends on other rows

    @classmethod
    def without_effect(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        """Say which options have no effect beside those that are given, each with the reason."""
        return {}

    # -- what some have ----------------------------------------------------------------------------------------------

    def steps(self, k: int) -> int:
        """Return the passes that are run to draft k tokens."""
        return k

    def stop_by(self, rule: Any, levels: Mapping[int, float]) -> None:
        """End drafts by a length policy's rule (draft_model/steps.py `StopRule`); levels: row -> threshold, kept up to
        date by the policy. Raises SpecdecError if the strategy has no draft steps that it could end."""
        raise SpecdecError(
            f"strategy {self.name!r} has no draft steps that length_policy could end: choose one that looks at the "
            "past alone, such as heuristic, goodput or auto"
        )

    def accept_path(self, row: int, nodes: Sequence[int]) -> None:
        """Learn the accepted nodes of a tree, from the first level on. Called before `accept`.

        A strategy that observes the target is told of every strategy's trees, whose nodes it saw verified.
        """

    def observe(self, output: PassOutput) -> None:
        """See a target pass, if the strategy has `observed_layers`."""

    def pipeline(
        self,
        requests: Sequence[DraftRequest],
        accepted: Tensor,
        token: Tensor,
        n: int | None = None,
        emitted: Tensor | None = None,
    ) -> bool:
        """Start the next drafts from the verdict on the device: accepted [B], token [B]. Returns True if it did.

        n: tokens of the longest; None = the strategy's own length
        emitted [B, n]: the accepted tokens and the one after them, then padding; for strategies that make trees
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
class ModelFree(Drafter):
    """Base of drafters that run no model: they read ids or tables, and have no q."""

    runs_a_model = False

    @property
    def shares_state(self) -> bool:
        return bool(getattr(self, "shared", False))

    @property
    def tree_nodes(self) -> int:
        return int(getattr(self, "nodes", 0))


@dataclass
class RowDrafter(ModelFree):
    """Base of drafters that read ids only and propose chains, each row's on its own."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(self._propose(r), drafter=self.name) for r in requests]

    def _propose(self, request: DraftRequest) -> list[int]:
        """Return the ids to propose for one row."""
        raise NotImplementedError


@dataclass
class TableDrafter(ModelFree):
    """Base of drafters that keep what the target's verify passes computed, and draft trees from it."""

    makes_trees = True
    observed_layers = ()  # logits alone
    _context: DraftContext = state()
    _device: torch.device = state()

    def fresh(self, context: DraftContext) -> Any:
        made = super().fresh(context)
        made._context, made._device = context, context.target_of(self.name).device
        return made

    def observe(self, output: PassOutput) -> None:
        """Learn from a pass with logits after every token; passes over prompts compute none but the last's."""
        if output.logits.shape[1] == output.tokens.shape[1]:
            self._learn(output)

    def _learn(self, output: PassOutput) -> None:
        raise NotImplementedError

    def _scores(self, logits: Tensor) -> Tensor:
        """Return logits [..., V'] over the target's vocabulary, float32 [..., V], with -inf for NaN."""
        return logits[..., : self._context.vocab_size].float().nan_to_num(nan=float("-inf"))


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
