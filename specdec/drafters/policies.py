"""Length policies to compare with automatic length: `generate(..., length_policy="heuristic")`, an axis of an ablation.

A policy says before a draft how many tokens it may have (`length`), and where it ends while it is made (`rule`). It
learns what was tested, up to the first rejection, and a rule sees a sampled token only if it stops after it: so all are
lossless (docs/automatic_length.md has the table, with sources). Your own: a subclass of `LengthPolicy`, named
`my_module:Name`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.config import check_number, check_whole
from specdec.drafters.base import Draft, DraftRequest
from specdec.drafters.length import Known, LengthController
from specdec.errors import SpecdecError
from specdec.files.own_code import find_object, make_object, parse_name


@dataclass
class LengthPolicy:
    """Base of policies. One object serves one strategy in one call.

    levels: row -> threshold, which the rule's scores are compared with; to be changed in `learn`
    """

    level: float = field(init=False, default=0.0)
    levels: dict[int, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def rule(self) -> Any:
        """How drafts end while they are made (draft_model/steps.py `StopRule`); None: they do not."""
        return None

    def begin(self, row: int) -> None:
        """Start a row."""
        self.levels[row] = self.level

    def length(self, row: int, longest: int) -> int:
        """Return the most tokens of the row's next draft; longest: that a pass can verify."""
        return longest

    def learn(self, row: int, accepted: int, rejected: bool) -> None:
        """Learn of a draft: how many tokens were accepted, and if the next one was rejected."""


@dataclass
class Heuristic(LengthPolicy):
    """transformers' `num_assistant_tokens_schedule="heuristic"`: `up` more if all were accepted, else `down` less."""

    start: int = 5
    up: int = 2
    down: int = 1
    lengths: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("start", "up", "down"):
            check_whole(f"heuristic: {name}", getattr(self, name), 1)

    def begin(self, row: int) -> None:
        self.lengths[row] = self.start

    def length(self, row: int, longest: int) -> int:
        return min(self.lengths[row], longest)

    def learn(self, row: int, accepted: int, rejected: bool) -> None:
        self.lengths[row] = max(1, self.lengths[row] - self.down) if rejected else self.lengths[row] + self.up


@dataclass(frozen=True)
class _TokenProbability:
    product: bool = False
    after: bool = True

    def score(self, q: Tensor, token: Tensor | None) -> Tensor:
        assert token is not None
        return q.gather(-1, token[:, None])[:, 0]


@dataclass
class Confidence(LengthPolicy):
    """transformers' `assistant_confidence_threshold`: stop after a token whose own probability is below `threshold`."""

    threshold: float = 0.4

    def __post_init__(self) -> None:
        check_number("confidence: threshold", self.threshold, 0.0, 1.0)
        self.level = self.threshold

    @property
    def rule(self) -> Any:
        return _TokenProbability()


@dataclass(frozen=True)
class _EntropyBound:
    gamma: float
    product: bool = False
    after: bool = False

    def score(self, q: Tensor, token: Tensor | None) -> Tensor:
        return 1.0 - (self.gamma * torch.special.entr(q).sum(-1)).sqrt()


@dataclass
class AdaEDL(LengthPolicy):
    """Stop where 1 - sqrt(gamma H(q)), a bound on acceptance, is below a threshold that follows the acceptance.

    Constants and update are those of Agrawal et al. 2024 (section 3.1, algorithm 1). Ours are: the first threshold,
    which the paper sweeps from 0.3 to 0.9; that only tested tokens count; that the first round sets the mean.

    threshold: at the start; it rises by `step` while the acceptance is below `target`, else it falls, but for rounds
    that accept all of a longest draft; `keep` smooths the moves, the acceptance is a mean with the memory `memory`
    """

    gamma: float = 0.2
    threshold: float = 0.0
    target: float = 0.9
    step: float = 0.01
    memory: float = 0.5
    keep: float = 0.9
    rates: dict[int, float] = field(init=False, repr=False, compare=False, default_factory=dict)
    longest: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        for name in ("threshold", "target", "step", "memory", "keep"):
            check_number(f"adaedl: {name}", getattr(self, name), 0.0, 1.0)
        check_number("adaedl: gamma", self.gamma, 0.0, math.inf)
        self.level = self.threshold

    @property
    def rule(self) -> Any:
        return _EntropyBound(self.gamma)

    def begin(self, row: int) -> None:
        super().begin(row)
        self.rates.pop(row, None)

    def length(self, row: int, longest: int) -> int:
        self.longest = longest
        return longest

    def learn(self, row: int, accepted: int, rejected: bool) -> None:
        if accepted + rejected == 0:
            return
        new = accepted / (accepted + rejected)
        rate = self.rates[row] = self.memory * self.rates.get(row, new) + (1 - self.memory) * new
        move = self.step if rate < self.target else 0.0 if accepted == self.longest else -self.step
        self.levels[row] += (1 - self.keep) * move


@dataclass(frozen=True)
class _Logistic:
    weights: tuple[float, ...]
    product: bool = True
    after: bool = False

    def score(self, q: Tensor, token: Tensor | None) -> Tensor:
        seen = torch.stack(features(q.topk(2).values), dim=-1)  # [B, 3]
        return torch.sigmoid((seen * torch.tensor(self.weights, device=q.device)).sum(-1))


def features(best: Tensor) -> tuple[Tensor, ...]:
    """Return what the classifier looks at: 1, log of the largest probability, and what the second is below it, [...].

    best [..., 2]: the two largest probabilities of q
    """
    return torch.ones_like(best[..., 0]), best[..., 0].clamp(min=1e-9).log(), best[..., 0] - best[..., 1]


@dataclass
class Classifier(LengthPolicy):
    """As SpecDec++: stop where some token so far is rejected with a probability above `stop`, by a trained classifier.

    weights: logistic regression on `features`, from `fit_classifier`. SpecDec++ reads the draft's hidden states.
    """

    weights: Sequence[float] = ()
    stop: float = 0.7

    def __post_init__(self) -> None:
        check_number("classifier: stop", self.stop, 0.0, 1.0)
        if not isinstance(self.weights, (list, tuple)) or len(self.weights) != 3:
            raise SpecdecError("classifier: give its three weights; specdec.research.offline.fit_stop trains them")
        for weight in self.weights:
            check_number("classifier: weights", weight, -1e6, 1e6)
        self.level = 1.0 - self.stop

    @property
    def rule(self) -> Any:
        return _Logistic(tuple(map(float, self.weights)))


class Goodput(LengthController):
    """SmartSpec's optimum: most expected tokens per second by the cost table, from one acceptance for the whole batch.

    As automatic length, without its budget. Where the text depends on drafts, every row has its own acceptance.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.pooled = [([0.0, 0.0], [0.0, 0.0]) for _ in self.free]

    def open(self, requests: Sequence[DraftRequest], waiting: int = 0) -> None:
        self.budget.update({r.row: math.inf for r in requests})
        super().open(requests, waiting)

    def _of(self, index: int, request: DraftRequest) -> Known:
        known = super()._of(index, request)
        if self.together:
            known.right, known.wrong = self.pooled[index]
        return known


class PolicyLengths:
    """Draft lengths of one call by policies, as `LengthController` for the chain; None: the strategy's own length."""

    can_plan = False  # a policy knows what all rounds before have taught it

    def plan(self, index: int, requests: Sequence[DraftRequest]) -> None:
        """Nothing."""

    def rests(self, requests: Sequence[DraftRequest]) -> bool:
        """Return False: a policy is asked in every round."""
        return False

    def rest(self, rows: Sequence[int]) -> None:
        """Nothing, see `rests`."""

    def __init__(self, drafters: Sequence[Any], policy: LengthPolicy, chosen: Sequence[bool], longest: int):
        self.automatic, self.longest = list(chosen), longest
        self.policies = [copy.deepcopy(policy) for _ in drafters]
        self.asked: dict[int, int] = {}  # row -> tokens to verify, in the open round
        self.planned: dict[int, int] = {}  # none, see `can_plan`
        for drafter, own, is_chosen in zip(drafters, self.policies, chosen, strict=True):
            if is_chosen and own.rule is not None:
                drafter.stop_by(own.rule, own.levels)

    def begin(self, row: int) -> None:
        for policy in self.policies:
            policy.begin(row)

    def open(self, requests: Sequence[DraftRequest], waiting: int = 0) -> None:
        """Nothing: policies know what they were told."""

    def ask(self, index: int, requests: dict[int, DraftRequest]) -> dict[int, DraftRequest]:
        if not self.automatic[index]:
            return requests
        for r in requests.values():
            self.asked[r.row] = min(self.policies[index].length(r.row, self.longest), r.n_max)
        return {i: r.up_to(self.asked[r.row]) for i, r in requests.items() if self.asked[r.row] > 0}

    def cut(self, index: int, request: DraftRequest, draft: Draft) -> Draft:
        return draft

    def accept(self, row: int, winner: int | None, n_accepted: int, drafted: int) -> None:
        if winner is not None and self.automatic[winner] and drafted:
            self.policies[winner].learn(row, n_accepted, drafted > n_accepted)


POLICIES: dict[str, Any] = {
    "fixed": None, "auto": LengthController, "goodput": Goodput, "heuristic": Heuristic, "confidence": Confidence,
    "adaedl": AdaEDL, "classifier": Classifier,
}  # fmt: skip


def find_policy(value: Any) -> Any:
    """Return "fixed", a kind of `LengthController`, or a policy, for what a user wrote. Raises SpecdecError."""
    if value is None or isinstance(value, LengthPolicy):
        return value
    if not isinstance(value, (str, Mapping)):
        raise SpecdecError(f"length_policy: give a name or a specdec.LengthPolicy, got {value!r}")
    if isinstance(value, str):
        name, options = parse_name(value, POLICIES, "length policy")
    else:
        options = dict(value)
        if "name" not in options:
            raise SpecdecError(f"length_policy: the mapping needs a name, got {value!r}")
        name = str(options.pop("name"))
    made = POLICIES[name] if name in POLICIES else find_object(name, POLICIES, "length policy")
    if made is None or (isinstance(made, type) and issubclass(made, LengthController)):
        if options:
            raise SpecdecError(f"length_policy {name!r} has no options, got {', '.join(options)}")
        return made or "fixed"
    policy = make_object(made, name, options, "length policy")
    if not isinstance(policy, LengthPolicy):
        raise SpecdecError(f"length policy {name!r} is no specdec.LengthPolicy: subclass it")
    return policy


def draft_length(policy: Any, given: str | None) -> str | None:
    """Return the option draft_length that a policy stands for. Raises SpecdecError if both were given."""
    if policy is not None and given is not None:
        raise SpecdecError("length_policy says how long drafts are: leave draft_length out")
    return given if policy is None else "given" if policy == "fixed" else "auto"
