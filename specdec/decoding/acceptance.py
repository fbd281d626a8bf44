"""Acceptance: which drafted tokens are accepted, and which token follows them. Batched, on device, chains and trees.

p is the target's distribution (softmax of its processed scores), q the distribution the draft was really sampled from.
A rule accepts or rejects every drafted token, and says what to emit at the first position where none is accepted.

- `match` (llama.cpp): sample the target at every position; accept a drafted token iff it equals the sample. Lossless
  for any proposal, because every emitted token is the target's own sample, with the same random numbers as plain
  decoding.
- `leviathan` (Leviathan et al. 2023; Chen et al. 2023): accept x ~ q with probability min(1, p(x) / q(x)); after a
  rejection sample the residual norm(max(0, p - q)), or p itself where the residual is empty. Rows whose draft has no q
  are judged by `match`, which has the same distribution for deterministic proposals.
- `coupled` (Daliri, Musco & Suresh 2024; Gumbel coupling): judged as `match` is, but model drafters sample q with the
  random numbers that the target samples p with. Equal numbers make equal tokens likely: the acceptance is
  sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) (theory.expected_acceptance), and the text is still plain decoding's.

Further rules are in block_verification.py, multi_draft.py and lossy_rules.py. Greedy is the T -> 0 case of all: a
drafted token is accepted iff it is the argmax.

Trees are walked from the newest token down, all rows at once: at each node the rule picks the accepted child, if any,
and the walk goes on there. Under `match`, `coupled`, greedy, and for drafts without q, it is the child that equals the
target's own token, sampled with the random numbers of its position, as in plain decoding. `leviathan` with q is
recursive rejection over siblings sampled without replacement (Jeon et al. 2024): with p_1 = p, accept sibling i
with probability min(1, p_i(x) / q_i(x)), else p_{i+1} = norm(max(0, p_i - q_i)); after the last sibling sample the last
residual. q_i is the distribution that sibling i was really sampled from, given the siblings before it. By induction
from the last sibling up, the node emits a sample of p_i from sibling i on, so of p from the first on: each sibling is
one step of the chain rule whose target is p_i. A residual of no mass means p_i <= q_i, so p_i = q_i, and only rounding
can have rejected: p_i then stays. A sibling whose whole q_i is zero was not sampled from anything (the support of q was
used up): it is never accepted and leaves p_i unchanged.

Rules are an open seam: `register_rule` adds one, or a function of parameters that makes some. A rule that changes the
output's distribution must say `lossy=True`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.files.own_code import find_object, make_object, parameters, parse_name
from specdec.models.trees import Tree
from specdec.sampling.sampling import Purpose, Sampling, best, fold, race, streams, uniform


class Once:
    """A property computed once per object. functools' own takes a lock, which the compiler does not trace."""

    def __init__(self, make: Callable[[Any], Any]):
        self.make = make

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        value = owner.__dict__[self.make.__name__] = self.make(owner)
        return value


# -- what a rule sees, and what it decides -----------------------------------------------------------------------------


@dataclass
class Block:
    """One target pass, as acceptance sees it: B rows of S columns, each the distribution after one fed token.

    scores [B, S, V]: float32, processed; column s predicts the token after the s-th fed token
    draft [B, S]: the token tested at column s (of a tree: node s, tested at column `tree.tested_at[s]`)
    lengths [B]: how many drafted tokens are tested
    final [B]: the draft ends here: a token follows if all are accepted (False: the draft's next chunk follows)
    totals [B]: tokens of the whole draft, later chunks included; acceptance does not look at it
    keys [B]: keys of the rows' random numbers
    positions [B]: sequence position of the token that column 0 predicts
    sampling: how the target is sampled
    q [B, S, V]: the draft's distributions; None: no row has any
    has_q [B]: rows that have a q
    all_have_q: the host knows that every row has a q, so the target need not be sampled at every position
    tree: the shape of the rows' trees, if some row's draft is one
    done [B]: tokens of the draft that earlier passes have accepted
    outside [B, S]: an id was drafted that the target lacks; `draft` is 0 there
    missing [B, S]: a node of a tree that does not exist; `draft` is 0 there
    round_keys [B]: keys that change every round, for a rule whose coins after the last accepted token must be fresh
    """

    scores: Tensor
    draft: Tensor
    lengths: Tensor
    final: Tensor
    totals: Tensor
    keys: Tensor
    positions: Tensor
    sampling: Sampling
    q: Tensor | None = None
    has_q: Tensor | None = None
    all_have_q: bool = False
    tree: Tree | None = None
    done: Tensor | None = None
    outside: Tensor | None = None
    missing: Tensor | None = None
    round_keys: Tensor | None = None

    @Once
    def p(self) -> Tensor:
        """The target's distributions [B, S, V]."""
        return torch.softmax(self.scores, dim=-1)

    @Once
    def columns(self) -> Tensor:
        """Indices of the columns, [S]."""
        return torch.arange(self.scores.shape[1], device=self.scores.device)

    @property
    def depths(self) -> Tensor:
        """Distance of each column from the newest token, in tokens, [S] or [B, S]."""
        return self.columns if self.tree is None else self.tree.depths

    def streams(self, purpose: Purpose, fresh: bool = False) -> Tensor:
        """Return random streams [B, S], one per position: columns of one depth share theirs. fresh: of this round.

        The streams of a row are one per position, whatever the round. A rule that has looked at a coin after the last
        accepted token would meet it again in the next round and be biased: it must ask for fresh ones.
        """
        keys = self.round_keys if fresh and self.round_keys is not None else self.keys
        return streams(keys[:, None], self.positions[:, None] + self.depths, purpose)

    @Once
    def own(self) -> Tensor:
        """The token that plain decoding would emit at every position, [B, S]."""
        return self.best[0] if self.sampling.greedy else race(self.p, self.streams(Purpose.SAMPLE))

    @Once
    def best(self) -> tuple[Tensor, Tensor]:
        """The argmax of the scores, and True where its score is finite, each [B, S]."""
        return best(self.scores)

    @property
    def sound(self) -> Tensor:
        """True where the scores make a distribution, [B, S]: no NaN, no +inf, not all -inf."""
        return self.best[1] if self.sampling.greedy else self.scores.amax(dim=-1).isfinite()

    @property
    def tested(self) -> Tensor:
        """True for drafted tokens that exist in this pass, [B, S]."""
        tested = self.columns < self.lengths[:, None]
        return tested if self.missing is None else tested & ~self.missing


@dataclass
class Verdict:
    """What a pass decides.

    accepted [B]: how many drafted tokens are accepted
    token [B]: the token after them
    failed [B]: the scores at that position are no distribution (NaN, +inf or all -inf); nothing may be emitted there
    path [B, levels]: with trees, the accepted nodes; the first `accepted` are real
    unsound [B]: 0, or what is wrong with a row's draft (`UNSOUND`); its verdict then means nothing
    """

    accepted: Tensor
    token: Tensor
    failed: Tensor
    path: Tensor | None = None
    unsound: Tensor | None = None

    def emitted(self, draft: Tensor) -> tuple[Tensor, Tensor]:
        """Return (tokens, columns), each [B, E]: what is emitted, and the columns that predicted it.

        The first accepted + 1 of them are real. draft [B, S].
        """
        columns = torch.arange(draft.shape[1], device=draft.device).expand_as(draft)
        if self.path is not None:
            columns = torch.nn.functional.pad(self.path + 1, (1, 0)).clamp(max=draft.shape[1] - 1)
            draft = torch.nn.functional.pad(draft.gather(1, self.path), (0, 1))
        steps = torch.arange(columns.shape[1], device=draft.device)
        return torch.where(steps < self.accepted[:, None], draft, self.token[:, None]), columns


@dataclass(frozen=True)
class AcceptanceRule:
    """A rule: two functions of a `Block`, a third for trees, and what they promise.

    accepts(block) -> bool [B, S]: drafted tokens that are accepted if all before them are
    next_token(block, column [B]) -> ids [B]: the token after the last accepted one, which was fed at `column`
    pick_child(block, column [B]) -> columns [B]: with trees, the accepted child of `column`, 0 for none; a rule without
        it judges chains only
    proposal: how model drafters must propose: "argmax"; "sample" of q, siblings without replacement; "independent"
        samples of q; or "coupled" and "coupled-independent", the same with the target's own random numbers
    lossy: the output's distribution is not the target's
    recordable: the functions are tensor operations on the block alone, so they may be recorded once and replayed for
        other blocks (not so for a rule with a state, a generator or a branch on values)
    same_text: for one seed the text is plain decoding's, because each emitted token is the target's own sample there
    distance(block, verdict) -> [B, E]: of a lossy rule, the total variation between the distribution that each emitted
        token (`verdict.emitted`) was taken from, given the text before it, and the target's
    """

    name: str
    proposal: Literal["argmax", "sample", "coupled", "independent", "coupled-independent"]
    accepts: Callable[[Block], Tensor]
    next_token: Callable[[Block, Tensor], Tensor]
    lossy: bool = False
    pick_child: Callable[[Block, Tensor], Tensor] | None = None
    recordable: bool = False
    same_text: bool = False
    distance: Callable[[Block, Verdict], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.lossy and self.distance is None:
            object.__setattr__(self, "distance", is_not_own)

    def keeps_text(self, greedy: bool) -> bool:
        """True if the tokens must be plain decoding's for the same seed."""
        return self.same_text or (greedy and not self.lossy)


# -- applying a rule ---------------------------------------------------------------------------------------------------


def judge(block: Block, rule: AcceptanceRule) -> Verdict:
    """Apply a rule to one pass, without a host read. Raises SpecdecError for trees under a rule without pick_child."""
    verdict = _judge_chains(block, rule) if block.tree is None else _judge_trees(block, block.tree, rule)
    verdict.unsound = unsound_drafts(block)
    return verdict


UNSOUND = {
    1: "proposed an id outside the target's vocabulary",
    2: "gave a q that its tokens cannot have been sampled from: each row must be a distribution, positive at its token",
    3: "proposed parents that are no tree: each must be -1 or a node before its child",
}
Q_TOLERANCE = 1e-2  # of the sum of a row of q


def unsound_drafts(block: Block) -> Tensor:
    """Find what is wrong with each row's draft, int64 [B]: a key of `UNSOUND`, or 0. Drafts stay on the device."""
    tested = block.columns < block.lengths[:, None]
    wrong = torch.zeros_like(block.lengths)
    if block.q is not None and block.has_q is not None and not block.sampling.greedy:
        sampled = block.q.gather(-1, block.draft[..., None])[..., 0] > 0
        sums_to_one = (block.q.amin(dim=-1) >= 0) & ((block.q.sum(dim=-1) - 1).abs() < Q_TOLERANCE)
        fine = sums_to_one & sampled
        if block.tree is not None:  # siblings beyond the support of q: they have no q and are never accepted
            fine = fine | ((block.q == 0).all(dim=-1))
        wrong = torch.where((~fine & tested).any(dim=-1) & block.has_q, 2, wrong)
    if block.outside is not None:
        wrong = torch.where((block.outside & tested).any(dim=-1), 1, wrong)
    if block.tree is not None:
        late = block.tree.parents >= block.columns
        wrong = torch.where(((late | (block.tree.parents < -1)) & tested).any(dim=-1), 3, wrong)
    return wrong


def _judge_chains(block: Block, rule: AcceptanceRule) -> Verdict:
    """Judge the chains of all rows at once."""
    sound = block.sound
    accepts = rule.accepts(block) & block.tested & sound
    accepted = accepts.long().cumprod(dim=-1).sum(dim=-1)  # [B]
    at = accepted.clamp(max=block.scores.shape[1] - 1)
    continues = (accepted == block.lengths) & ~block.final
    failed = ~sound.gather(1, at[:, None])[:, 0] & ~continues
    return Verdict(accepted, rule.next_token(block, at), failed)


def _judge_trees(block: Block, tree: Tree, rule: AcceptanceRule) -> Verdict:
    """Walk down the trees of all rows at once, level by level."""
    if rule.pick_child is None:
        raise SpecdecError(
            f"acceptance rule {rule.name!r} judges chains only: draft chains, or give a rule of your own pick_child"
        )
    width = block.scores.shape[1]
    sound = block.sound
    column, accepted = torch.zeros_like(block.lengths), torch.zeros_like(block.lengths)
    walking, path = torch.ones_like(column, dtype=torch.bool), []
    for _ in range(tree.levels):
        at = column.clamp(max=width - 1)
        # Column `width` is the last token of a chain that fills its pass: nothing was fed there.
        walking = walking & (column < width) & pick(sound, at)
        if tree.limits is not None:
            walking = walking & (accepted < tree.limits)
        child = torch.where(walking, rule.pick_child(block, at), 0)
        walking = child > 0
        column = torch.where(walking, child, column)
        accepted = accepted + walking
        path.append((child - 1).clamp(min=0))
    at = column.clamp(max=width - 1)
    continues = (accepted == block.lengths) & ~block.final
    failed = ~pick(sound, at) & ~continues
    return Verdict(accepted, rule.next_token(block, at), failed, torch.stack(path, dim=1))


def pick(values: Tensor, column: Tensor) -> Tensor:
    """Take values [B, S, ...] at one column per row, column [B] -> [B, ...]."""
    return values[torch.arange(values.shape[0], device=values.device), column]


# -- match, coupled, greedy: a drafted token is accepted iff it is the target's own ------------------------------------


def is_own(block: Block) -> Tensor:
    """Accept drafted tokens that equal the target's own, [B, S]."""
    return block.own == block.draft


def own_token(block: Block, column: Tensor) -> Tensor:
    """Return the target's own token at one column per row, [B]."""
    return pick(block.own, column)


def is_not_own(block: Block, verdict: Verdict) -> Tensor:
    """Return 1 where the emitted token is not the target's own sample, [B, E]; its mean bounds the total variation."""
    tokens, columns = verdict.emitted(block.draft)
    return (tokens != block.own.gather(1, columns)).float()


def pick_own_child(block: Block, column: Tensor) -> Tensor:
    """Pick the first child that equals the target's own token, as a column [B]; 0 = none."""
    assert block.tree is not None
    is_child = (block.tree.tested_at == column[:, None]) & block.tested
    other = ~(is_child & (block.draft == pick(block.own, column)[:, None]))
    before = other.long().cumprod(dim=-1).sum(dim=-1)  # nodes before the first that fits
    return torch.where(before < other.shape[1], before + 1, 0)


# -- leviathan: by the ratio of p and q --------------------------------------------------------------------------------


def passes_ratio(block: Block) -> Tensor:
    """Accept drafted tokens x whose coin is below p(x) / q(x), [B, S]."""
    if block.q is None or block.sampling.greedy:
        return is_own(block)
    assert block.has_q is not None
    index = block.draft[..., None]
    p, q = block.p.gather(-1, index)[..., 0], block.q.gather(-1, index)[..., 0]  # [B, S]
    by_ratio = uniform(block.streams(Purpose.ACCEPT)) * q < p  # never a division, so never 0 / 0
    if block.all_have_q:
        return by_ratio
    return torch.where(block.has_q[:, None], by_ratio, is_own(block))


def residual_token(block: Block, column: Tensor) -> Tensor:
    """Sample the residual where a drafted token was rejected, and p where none was, [B]."""
    if block.q is None or block.sampling.greedy:
        return own_token(block, column)
    if block.tree is not None:
        left = reject_siblings(block, column)
        position = block.positions + pick(block.tree.depths, column)
        return race(left.residual, next_stream(block, position, left.rejected))
    return sample_residual(block, column, torch.ones_like(block.p[:, 0, 0]))


def sample_residual(block: Block, column: Tensor, weight: Tensor) -> Tensor:
    """Sample norm(max(0, weight p - q)) in rows whose draft goes on at `column`, and p in the others, [B]."""
    assert block.q is not None and block.has_q is not None
    rejected = (column < block.lengths) & block.has_q
    p, q = pick(block.p, column), pick(block.q, column)  # [B, V]
    residual = (weight[:, None] * p - q).clamp(min=0)
    mass = residual.sum(dim=-1, keepdim=True)
    # Rows without q get here as well: their sample of p with the SAMPLE stream is the one `match` compares with.
    # Normalised: weights below float32's smallest normal number would lose their race to tokens of weight zero.
    weights = torch.where(rejected[:, None] & (mass > 0), residual / mass, p)
    return race(weights, next_stream(block, block.positions + column, rejected))


def next_stream(block: Block, position: Tensor, rejected: Tensor) -> Tensor:
    """Return the stream [B] of the next token: the target's own unless a drafted token was rejected there."""
    residual, own = (streams(block.keys, position, purpose) for purpose in (Purpose.RESIDUAL, Purpose.SAMPLE))
    return torch.where(rejected, residual, own)


def pick_by_ratio(block: Block, column: Tensor) -> Tensor:
    """Pick the child that recursive rejection accepts, as a column [B]; 0 = none."""
    if block.q is None or block.sampling.greedy:
        return pick_own_child(block, column)
    assert block.has_q is not None
    child = reject_siblings(block, column).child
    return child if block.all_have_q else torch.where(block.has_q, child, pick_own_child(block, column))


def children_of(block: Block, column: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the children of one column per row, in order of proposal: (column, node, exists), each [B]."""
    assert block.tree is not None
    is_child = block.tree.tested_at == column[:, None]
    for i in range(block.tree.siblings):
        found = is_child & (block.tree.rank == i) & block.tested  # [B, S], at most one a row
        node = found.long().argmax(dim=-1)
        exists = found.any(dim=-1)
        yield torch.where(exists, node + 1, 0), node, exists


@dataclass
class Siblings:
    """Recursive rejection at one column per row.

    child [B]: the column that is accepted, 0 = none
    residual [B, V]: what is left of p
    rejected [B]: some sibling was tested and rejected
    """

    child: Tensor
    residual: Tensor
    rejected: Tensor


def reject_siblings(block: Block, column: Tensor, points: bool = False) -> Siblings:
    """Test the children of `column` [B] one after the other, updating the residual; rows without q are not tested.

    points: each child is judged as if its q were all on it, whatever it was sampled from
    """
    assert block.tree is not None
    has_q = block.has_q if block.has_q is not None and not points else block.lengths >= 0
    position = block.positions + pick(block.tree.depths, column)
    stream = streams(block.keys, position, Purpose.ACCEPT)
    p = pick(block.p, column)
    accepted, rejected = torch.zeros_like(column), torch.zeros_like(has_q)
    for i, (child, node, exists) in enumerate(children_of(block, column)):
        tested = exists & has_q & (accepted == 0)
        token = pick(block.draft, node)[:, None]  # [B, 1]
        q = pick(block.q, node) if block.q is not None and not points else torch.zeros_like(p).scatter(1, token, 1.0)
        # Each sibling has its own coin; the first sibling's is the one a chain would use.
        coin = uniform(stream if i == 0 else fold(stream, i))
        by_ratio = coin * q.gather(1, token)[:, 0] < p.gather(1, token)[:, 0]
        accepts = tested & by_ratio & (q.amax(dim=-1) > 0)
        rejects = tested & ~accepts
        residual = (p - q).clamp(min=0)
        mass = residual.sum(dim=-1, keepdim=True)
        p = torch.where(rejects[:, None] & (mass > 0), residual / mass, p)
        accepted = torch.where(accepts, child, accepted)
        rejected = rejected | rejects
    return Siblings(accepted, p, rejected)


# -- rules by name -----------------------------------------------------------------------------------------------------

RULES: dict[str, AcceptanceRule | Callable[..., AcceptanceRule]] = {}
_MADE: dict[tuple[Any, str], AcceptanceRule] = {}  # of functions, so that equal parameters give the same object
R = TypeVar("R", bound="AcceptanceRule | Callable[..., AcceptanceRule]")


def register_rule(rule: R) -> R:
    """Make a rule available by name, or a function with keyword parameters that returns one ("typical:eps=0.3").

    A rule that changes the distribution of the output must set `lossy=True`.
    """
    RULES[rule.name if isinstance(rule, AcceptanceRule) else rule.__name__] = rule
    return rule


MATCH = register_rule(
    AcceptanceRule("match", "argmax", is_own, own_token, pick_child=pick_own_child, recordable=True, same_text=True)
)
LEVIATHAN = register_rule(
    AcceptanceRule("leviathan", "sample", passes_ratio, residual_token, pick_child=pick_by_ratio, recordable=True)
)
COUPLED = register_rule(replace(MATCH, name="coupled", proposal="coupled"))


def find_rule(rule: Any) -> AcceptanceRule:
    """Find a rule by name ("typical:eps=0.3") or in a module ("my_module:my_rule"); a rule is returned unchanged.

    Raises SpecdecError for an unknown name or parameter.
    """
    if isinstance(rule, AcceptanceRule):
        return rule
    if not isinstance(rule, str):
        raise SpecdecError(f"acceptance: expected the name of a rule or an AcceptanceRule, got {rule!r}")
    name, options = parse_name(rule, RULES, "acceptance rule")
    made = RULES[name] if name in RULES else find_object(name, sorted(RULES), "acceptance rule")
    if isinstance(made, AcceptanceRule):
        if options:
            raise SpecdecError(f"acceptance rule {name!r} has no options, got {', '.join(options)}")
        return made
    if not callable(made):
        raise SpecdecError(f"acceptance {name!r} is not a rule: expected an AcceptanceRule or a function, got {made!r}")
    return _from_function(made, name, options)


def _from_function(make: Callable[..., Any], name: str, options: Mapping[str, Any]) -> AcceptanceRule:
    """Make a rule with all parameters in its name, so that results tell such rules apart."""
    values = {**parameters(make), **options}
    texts = (f"{k}={v if isinstance(v, str) else json.dumps(v, default=str)}" for k, v in values.items())
    full = ":".join([name, *texts])
    if (make, full) not in _MADE:
        made = make_object(make, name, options, "acceptance rule")
        if not isinstance(made, AcceptanceRule):
            raise SpecdecError(f"acceptance {name!r} is not a rule: it made {type(made).__name__}, not AcceptanceRule")
        _MADE[make, full] = replace(made, name=full)
    return _MADE[make, full]
