"""Acceptance: which drafted tokens stand, and which token follows them. Batched, on device, chains and trees.

Given the target's scores after each fed token, a rule says for every drafted token whether it *stands*, and what to
emit at the first position where none does. p is the target's law (softmax of the scores), q the law the draft was
really drawn from.

- `match` (llama.cpp): sample the target at every position; a drafted token stands iff it equals the sample. Lossless
  for any proposal, because every emitted token is the target's own draw, with the same random numbers as plain
  decoding.
- `leviathan` (Leviathan et al. 2023; Chen et al. 2023): x ~ q stands with probability min(1, p(x) / q(x)); on a
  rejection the residual norm(max(0, p - q)) is sampled, and p itself where the residual is empty. Rows whose draft
  makes no claim about q are judged by `match`, which has the same law for deterministic proposals.
- `coupled` (Daliri, Musco & Suresh 2024; Gumbel coupling): judged as `match` is, but model drafters draw from q with
  the random numbers that the target draws from p with. Equal numbers make equal tokens likely: the acceptance is
  sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) (theory.expected_acceptance), and the text is still plain decoding's.

Greedy is the T -> 0 case of all: a drafted token stands iff it is the argmax.

Trees are walked from the newest token down, in all rows at once: at each node the rule says which child stands, if
any, and the walk goes on there. `match`, `coupled`, greedy and drafts without q: the child that equals the target's own
token, drawn with the numbers of its position and so plain decoding's. `leviathan` with q is recursive rejection over
the siblings (SpecInfer, Miao et al. 2023; Jeon et al. 2024): with p_1 = p, sibling i stands with probability
min(1, p_i(x) / q_i(x)), else p_{i+1} = norm(max(0, p_i - q_i)); after the last sibling the last residual is sampled.
q_i is the law that sibling i was really drawn from, given the siblings before it. By induction from the last sibling
up, what the node emits has law p_i before sibling i is looked at, so p before the first: each sibling is one step of
the chain rule whose target is p_i. A residual of no mass means p_i <= q_i, so p_i = q_i and no rejection but by
rounding: p_i then stays. A sibling whose whole q_i is zero was not drawn from anything (the support of q was used
up): it never stands and leaves p_i as it is.

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
from specdec.models.trees import TreeLayout
from specdec.sampling.sampling import Purpose, Sampling, best, fold, race, streams, uniform


class Once:
    """A property that is computed once an object: functools' own takes a lock, which the compiler does not trace."""

    def __init__(self, make: Callable[[Any], Any]):
        self.make = make

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        value = owner.__dict__[self.make.__name__] = self.make(owner)
        return value


@dataclass
class Block:
    """One target pass, as acceptance sees it. Column s holds the law of the token after the s-th fed token.

    scores [B, S, V] float32, processed; draft [B, S]: the drafted token tested at column s; lengths [B]: how many are
    tested; final [B]: whether the draft ends here, so that a token follows when all stand (False: the next chunk goes
    on); q [B, S, V] float32 and has_q [B], or None; all_claim: whether the host knows that every row has a q, so that
    the target need not be sampled at every position; totals [B]: lengths of the whole drafts, chunks to come
    included (acceptance does not look at them); keys [B]: row keys; positions [B]: sequence position of the
    token that column 0 predicts; tree: where the columns stand, when some row's draft is a tree. Drafted token s
    is then node s, tested at the column that `tree` names and fed, if at all, at column s + 1; done [B]: how many
    tokens of the row's draft earlier passes have accepted.
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
    all_claim: bool = False
    tree: TreeLayout | None = None
    done: Tensor | None = None
    outside: Tensor | None = None  # [B, S]: where an id that the target lacks was drafted; `draft` is 0 there
    missing: Tensor | None = None  # [B, S]: nodes of trees that do not exist; `draft` is 0 there

    @Once
    def p(self) -> Tensor:
        return torch.softmax(self.scores, dim=-1)

    @Once
    def columns(self) -> Tensor:
        return torch.arange(self.scores.shape[1], device=self.scores.device)

    @property
    def depths(self) -> Tensor:
        """How far each column is from the newest token, [S] or [B, S]."""
        return self.columns if self.tree is None else self.tree.depths

    def streams(self, purpose: Purpose) -> Tensor:
        """Random streams [B, S], one per position: columns of one depth share theirs."""
        return streams(self.keys[:, None], self.positions[:, None] + self.depths, purpose)

    @Once
    def own(self) -> Tensor:
        """The target's own choice at every position [B, S]: what plain decoding would emit there."""
        return self.best[0] if self.sampling.greedy else race(self.p, self.streams(Purpose.SAMPLE))

    @Once
    def best(self) -> tuple[Tensor, Tensor]:
        return best(self.scores)

    @property
    def sound(self) -> Tensor:
        """Where the scores make a law, [B, S]: NaN and +inf are in none, and nothing but -inf is none."""
        return self.best[1] if self.sampling.greedy else self.scores.amax(dim=-1).isfinite()


@dataclass
class Verdict:
    """accepted [B]: drafted tokens that stand; token [B]: the token after them; failed [B]: the law at that position
    is not a law (NaN or all -inf scores), so nothing may be emitted there; path [B, levels]: of trees, the nodes that
    stand, the first `accepted` of them real; unsound [B]: 0, or what is wrong with a row's draft (`UNSOUND`), whose
    verdict then means nothing."""

    accepted: Tensor
    token: Tensor
    failed: Tensor
    path: Tensor | None = None
    unsound: Tensor | None = None

    def emitted(self, draft: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, columns), each [B, E]: what came out, the first accepted + 1 of them real, and whose laws it obeys.
        draft [B, S]."""
        columns = torch.arange(draft.shape[1], device=draft.device).expand_as(draft)
        if self.path is not None:
            columns = torch.nn.functional.pad(self.path + 1, (1, 0)).clamp(max=draft.shape[1] - 1)
            draft = torch.nn.functional.pad(draft.gather(1, self.path), (0, 1))
        steps = torch.arange(columns.shape[1], device=draft.device)
        return torch.where(steps < self.accepted[:, None], draft, self.token[:, None]), columns


@dataclass(frozen=True)
class AcceptanceRule:
    """stands(block) -> bool [B, S]; follow(block, column [B]) -> ids [B]: the token after the last accepted one, which
    was fed at `column`; descend(block, column [B]) -> columns [B]: of trees, the child of `column` that stands, 0 for
    none. A rule without it judges chains only.

    proposal: how model drafters must propose under this rule: their argmax, a sample of q, or ("coupled") the sample of
    q that the target's own random numbers give. recordable: the functions are tensor operations on the block alone, so
    that what they did once may be recorded and replayed for other blocks (a rule with a state, a generator or a branch
    on values is not). same_text: for one seed the text is plain decoding's, because each emitted token is the target's
    own sample there.
    """

    name: str
    proposal: Literal["argmax", "sample", "coupled"]
    stands: Callable[[Block], Tensor]
    follow: Callable[[Block, Tensor], Tensor]
    lossy: bool = False
    descend: Callable[[Block, Tensor], Tensor] | None = None
    recordable: bool = False
    same_text: bool = False

    def keeps_text(self, greedy: bool) -> bool:
        """Whether the tokens must be plain decoding's."""
        return self.same_text or (greedy and not self.lossy)


def judge(block: Block, rule: AcceptanceRule) -> Verdict:
    """Apply a rule to one pass. No host read. Raises SpecdecError for a tree under a rule that judges chains only."""
    verdict = _scan(block, rule) if block.tree is None else _walk(block, block.tree, rule)
    verdict.unsound = unsound_drafts(block)
    return verdict


UNSOUND = {
    1: "proposed an id outside the target's vocabulary",
    2: "claimed a q that its tokens cannot have been drawn from: its rows must be laws, positive at the drafted token",
}
Q_TOLERANCE = 1e-2  # of the sum of a row of q


def unsound_drafts(block: Block) -> Tensor:
    """What is wrong with each row's draft, int64 [B], 0 = nothing: only the device sees the numbers of most drafts."""
    tested = block.columns < block.lengths[:, None]
    wrong = torch.zeros_like(block.lengths)
    if block.q is not None and block.has_q is not None and not block.sampling.greedy:
        drawn = block.q.gather(-1, block.draft[..., None])[..., 0] > 0
        law = (block.q.amin(dim=-1) >= 0) & ((block.q.sum(dim=-1) - 1).abs() < Q_TOLERANCE)
        fine = law & drawn
        if block.tree is not None:  # siblings beyond the support of q: they have no law and never stand
            fine = fine | ((block.q == 0).all(dim=-1))
        wrong = torch.where((~fine & tested).any(dim=-1) & block.has_q, 2, wrong)
    if block.outside is not None:
        wrong = torch.where((block.outside & tested).any(dim=-1), 1, wrong)
    return wrong


def _scan(block: Block, rule: AcceptanceRule) -> Verdict:
    """Along the chains of all rows at once."""
    sound = block.sound
    tested = block.columns < block.lengths[:, None]
    stands = rule.stands(block) & tested & sound
    accepted = stands.long().cumprod(dim=-1).sum(dim=-1)  # [B]
    at = accepted.clamp(max=block.scores.shape[1] - 1)
    ongoing = (accepted == block.lengths) & ~block.final
    failed = ~sound.gather(1, at[:, None])[:, 0] & ~ongoing
    return Verdict(accepted, rule.follow(block, at), failed)


def _walk(block: Block, tree: TreeLayout, rule: AcceptanceRule) -> Verdict:
    """From the newest token down the tree, level by level, all rows at once."""
    if rule.descend is None:
        raise SpecdecError(f"acceptance rule {rule.name!r} judges chains only: it has no descend(block, column)")
    width = block.scores.shape[1]
    sound = block.sound
    column, accepted = torch.zeros_like(block.lengths), torch.zeros_like(block.lengths)
    walking, path = torch.ones_like(column, dtype=torch.bool), []
    for _ in range(tree.levels):
        at = column.clamp(max=width - 1)
        # Column `width` is the last token of a chain that fills its pass: nothing was fed there.
        walking = walking & (column < width) & _pick(sound, at)
        child = torch.where(walking, rule.descend(block, at), 0)
        walking = child > 0
        column = torch.where(walking, child, column)
        accepted = accepted + walking
        path.append((child - 1).clamp(min=0))
    at = column.clamp(max=width - 1)
    ongoing = (accepted == block.lengths) & ~block.final
    failed = ~_pick(sound, at) & ~ongoing
    return Verdict(accepted, rule.follow(block, at), failed, torch.stack(path, dim=1))


def _pick(values: Tensor, column: Tensor) -> Tensor:
    """values [B, S, ...] at one column per row -> [B, ...]."""
    return values[torch.arange(values.shape[0], device=values.device), column]


def _match_stands(block: Block) -> Tensor:
    return block.own == block.draft


def _match_follow(block: Block, column: Tensor) -> Tensor:
    return _pick(block.own, column)


def _match_descend(block: Block, column: Tensor) -> Tensor:
    """The first child that is the target's own token."""
    found = torch.zeros_like(column)
    for child, node, tested in children_of(block, column):
        fits = tested & (_pick(block.draft, node) == _pick(block.own, column))
        found = torch.where((found == 0) & fits, child, found)
    return found


def children_of(block: Block, column: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The children of one column a row, in order of proposal: their columns, their nodes, and whether they exist."""
    assert block.tree is not None
    for child in _pick(block.tree.children, column).unbind(dim=1):
        node = (child - 1).clamp(min=0)
        exists = (child > 0) & (node < block.lengths)
        if block.missing is not None:
            exists = exists & ~_pick(block.missing, node)
        yield child, node, exists


def _leviathan_stands(block: Block) -> Tensor:
    if block.q is None or block.sampling.greedy:
        return _match_stands(block)
    assert block.has_q is not None
    index = block.draft[..., None]
    p, q = block.p.gather(-1, index)[..., 0], block.q.gather(-1, index)[..., 0]  # [B, S]
    by_ratio = uniform(block.streams(Purpose.ACCEPT)) * q < p  # never a division, so never 0 / 0
    if block.all_claim:
        return by_ratio
    return torch.where(block.has_q[:, None], by_ratio, _match_stands(block))


@dataclass
class Siblings:
    """Recursive rejection at one column a row. child [B]: the column that stands, 0 = none; law [B, V]: what is left of
    p; rejected [B]: whether any sibling was tested and fell."""

    child: Tensor
    law: Tensor
    rejected: Tensor


def reject_siblings(block: Block, column: Tensor) -> Siblings:
    """Test the children of `column` [B] one after the other, with the residual updated in between; rows whose draft
    claims no q have none that is tested."""
    assert block.q is not None and block.has_q is not None and block.tree is not None
    position = block.positions + _pick(block.tree.depths, column)
    stream = streams(block.keys, position, Purpose.ACCEPT)
    law = _pick(block.p, column)
    found, rejected = torch.zeros_like(column), torch.zeros_like(block.has_q)
    for i, (child, node, exists) in enumerate(children_of(block, column)):
        tested = exists & block.has_q & (found == 0)
        token, q = _pick(block.draft, node)[:, None], _pick(block.q, node)  # [B, 1], [B, V]
        # A coin of its own for each sibling; the first one's is the chain's, whatever else the pass holds.
        coin = uniform(stream if i == 0 else fold(stream, i))
        by_ratio = coin * q.gather(1, token)[:, 0] < law.gather(1, token)[:, 0]
        stands = tested & by_ratio & (q.amax(dim=-1) > 0)
        fell = tested & ~stands
        residual = (law - q).clamp(min=0)
        mass = residual.sum(dim=-1, keepdim=True)
        law = torch.where(fell[:, None] & (mass > 0), residual / mass, law)
        found = torch.where(stands, child, found)
        rejected = rejected | fell
    return Siblings(found, law, rejected)


def _leviathan_descend(block: Block, column: Tensor) -> Tensor:
    if block.q is None or block.sampling.greedy:
        return _match_descend(block, column)
    assert block.has_q is not None
    child = reject_siblings(block, column).child
    return child if block.all_claim else torch.where(block.has_q, child, _match_descend(block, column))


def _leviathan_follow(block: Block, column: Tensor) -> Tensor:
    if block.q is None or block.sampling.greedy:
        return _match_follow(block, column)
    if block.tree is not None:
        left = reject_siblings(block, column)
        position = block.positions + _pick(block.tree.depths, column)
        return race(left.law, _after(block, position, left.rejected))
    return _residual_follow(block, column)


def _after(block: Block, position: Tensor, rejected: Tensor) -> Tensor:
    """The streams [B] of the token that follows: the target's own unless a drafted token was rejected there."""
    fallen, own = (streams(block.keys, position, purpose) for purpose in (Purpose.RESIDUAL, Purpose.SAMPLE))
    return torch.where(rejected, fallen, own)


def _residual_follow(block: Block, accepted: Tensor) -> Tensor:
    assert block.q is not None and block.has_q is not None
    rejected = accepted < block.lengths
    p, q = _pick(block.p, accepted), _pick(block.q, accepted)  # [B, V]
    residual = (p - q).clamp(min=0)
    mass = residual.sum(dim=-1, keepdim=True)
    use = (rejected & block.has_q)[:, None] & (mass > 0)
    drawn = _after(block, block.positions + accepted, rejected & block.has_q)
    # Rows without q land here as well: their draw from p with the SAMPLE stream is the sample `match` compared with.
    # Normalised, because weights below float32's smallest normal number would lose their race to tokens without any.
    return race(torch.where(use, residual / mass, p), drawn)


RULES: dict[str, AcceptanceRule | Callable[..., AcceptanceRule]] = {}
_MADE: dict[tuple[Any, str], AcceptanceRule] = {}  # of functions, so that equal parameters give the same object
R = TypeVar("R", bound="AcceptanceRule | Callable[..., AcceptanceRule]")


def register_rule(rule: R) -> R:
    """Make a rule available by its name, or a function with keyword parameters that returns one ("typical:eps=0.3").

    A rule that changes the distribution of the output must set `lossy=True`.
    """
    RULES[rule.name if isinstance(rule, AcceptanceRule) else rule.__name__] = rule
    return rule


MATCH = register_rule(
    AcceptanceRule(
        "match", "argmax", _match_stands, _match_follow, descend=_match_descend, recordable=True, same_text=True
    )
)
LEVIATHAN = register_rule(
    AcceptanceRule(
        "leviathan", "sample", _leviathan_stands, _leviathan_follow, descend=_leviathan_descend, recordable=True
    )
)
COUPLED = register_rule(
    AcceptanceRule(
        "coupled", "coupled", _match_stands, _match_follow, descend=_match_descend, recordable=True, same_text=True
    )
)


def find_rule(rule: Any) -> AcceptanceRule:
    """A rule by name with its parameters, one of the user's own ("my_module:my_rule"), or a rule as it is.

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
    """The rule that a function makes, with all parameters in its name, so that results tell such rules apart."""
    values = {**parameters(make), **options}
    texts = (f"{k}={v if isinstance(v, str) else json.dumps(v, default=str)}" for k, v in values.items())
    full = ":".join([name, *texts])
    if (make, full) not in _MADE:
        made = make_object(make, name, options, "acceptance rule")
        if not isinstance(made, AcceptanceRule):
            raise SpecdecError(f"acceptance {name!r} is not a rule: it made {type(made).__name__}, not AcceptanceRule")
        _MADE[make, full] = replace(made, name=full)
    return _MADE[make, full]
