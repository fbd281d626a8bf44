"""What if: from one plain run, what every draft length, p_min and chain order would have done. No draft is ever run.

    found = estimate(decoder, prompts, ks=range(1, 9), p_mins=(0.0, 0.4), chains=["ngram-mod,draft-model:n_max=5"],
                     acceptance="leviathan", temperature=0.8, cost=measure_cost(decoder))
    found.best()

The target writes the texts once, plainly; then target and draft read them, a *teacher-forced* pass each. At every token
x of the text this gives the probability w that a draft would have been accepted there, given that x was written:
min(1, q(x) / p(x)) under `leviathan` (specdec.theory, which also says why products of 1 - TV would be biased), 1 or 0
for argmax proposals (greedy, `match`) and for `coupled`, whose samples are known. Along a text the tests are
independent, so that

- drafts of the draft model alone are a Markov chain over round starts, and their expected rounds are computed exactly,
  for every k and p_min at once; so are those of trees of fixed shapes, from the chance of each sibling, and the best
  shape of a size is found (what_if_trees.py);
- chains are replayed round by round (specdec.research.replay), n-gram strategies with their real state and drafts, the
  draft model with a coin of probability w at every position; where all w are 0 or 1 one replay is exact.

Averaged over texts both are unbiased; for greedy, `match` and `coupled` runs, whose text does not depend on the
drafter, they are about the very texts that a speculative run would write. Not covered, and refused: trees in chains
with others, `branches`, `top_n`, and `n_min` where it would throw drafts away. One estimate is approximate: how many
tokens are drafted after the first that is rejected, where p_min decides; the text's own confidences stand in for those
of the draft's continuation. Strategies that are told to share state between rows are replayed row after row, as with
batch_size=1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from specdec.config import check_number, check_whole
from specdec.decoder import check_draft
from specdec.decoding.timing import measure_passes, room_for
from specdec.drafters import make_drafters
from specdec.drafters.base import Draft, DraftContext, Drafter, DraftRequest, Tokens
from specdec.drafters.chain import build_chain
from specdec.drafters.tree_plan import parse_plan, plan_of, plan_parents
from specdec.errors import SpecdecError
from specdec.models.trees import Parents, depths_of, most_children
from specdec.research.bootstrap import ratio
from specdec.research.offline.forcing import ForcedText, force
from specdec.research.offline.replay import Text, model_free_chain, replay
from specdec.research.offline.what_if_trees import best_shape, tree_counts
from specdec.theory import Costs

RULES = ("leviathan", "match", "coupled")
SIBLINGS = 8  # most children of a node in the best shapes


@dataclass(frozen=True)
class Plan:
    """One setting and what it gives.

    chain: the strategies as given, or "draft-model" with k and p_min, or with a tree.
    tokens, rounds: over all texts.
    low, high: 95 % interval of tokens_per_round, from resampled texts; None = of one text.
    drafted_per_round: tokens.
    speedup: None = without costs; of chains, where the model's share is unknown.
    counts: (tokens, rounds, drafted tokens) of each text.
    """

    chain: str
    k: int | None
    p_min: float | None
    tokens: int
    rounds: float
    tokens_per_round: float
    low: float | None
    high: float | None
    drafted_per_round: float
    speedup: float | None
    counts: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the counts of single texts."""
        return {name: value for name, value in asdict(self).items() if name != "counts"}


@dataclass(frozen=True)
class WhatIf:
    """What `estimate` found.

    plans: draft-model for every p_min and k, then the chains.
    expected_acceptance: mean over all tokens; None = without a draft model.
    texts: what it was computed from.
    """

    plans: list[Plan]
    expected_acceptance: float | None
    texts: list[ForcedText]

    def best(self) -> Plan:
        """The plan with the largest known speed-up, or with most tokens per round where none is known."""
        known = [p for p in self.plans if p.speedup is not None]
        return max(known or self.plans, key=lambda p: p.tokens_per_round if p.speedup is None else p.speedup)


def estimate(
    decoder: Any,
    prompts: Any,
    ks: Sequence[int] | None = None,
    p_mins: Sequence[float] = (0.0,),
    chains: Sequence[Any] = (),
    trees: Sequence[Any] = (),
    *,
    acceptance: str = "leviathan",
    outputs: Sequence[Sequence[int]] | None = None,
    cost: Costs | None = None,
    samples: int = 16,
    seed: int = 0,
    **options: Any,
) -> WhatIf:
    """Estimate plans from one plain run.

    ks, p_mins: draft lengths and thresholds of `draft-model`; ks=None = 1..8 with a draft model, else none.
    chains: strategies in any form that `generate` takes.
    trees: shapes of draft-model's `tree=`, and numbers of nodes: the best shape of so many nodes on these texts.
    acceptance: leviathan, match or coupled.
    outputs: texts of an earlier plain run with the same options, in place of one now.
    cost: for speed-ups, for instance of `measure_cost`.
    samples: replays of a chain where acceptance is random.
    seed: of the plain run, of the replays and of the intervals.
    options: of `generate`.
    Raises SpecdecError for another rule, a plan that is not covered, or nothing to estimate.
    """
    ks = (range(1, 9) if decoder.draft is not None else ()) if ks is None else ks
    _check(acceptance, p_mins, {"draft lengths": ks, "trees": trees}, decoder.draft is not None)
    call = decoder._call(prompts, [], acceptance=acceptance, seed=seed, **options)
    if not call.rows or not (ks or chains or trees):
        raise SpecdecError("what_if: nothing to estimate: give prompts, and draft lengths, trees or chains")
    greedy = call.sampling.greedy
    made = [(_label(chain), _drafters(chain, decoder, greedy or acceptance == "match")) for chain in chains]
    if outputs is None:
        outputs = decoder.generate(prompts, strategies=[], acceptance=acceptance, seed=seed, **options).token_ids
    sizes = [tree for tree in trees if isinstance(tree, int)]
    shapes = [plan_parents(parse_plan(tree, "what_if")) for tree in trees if not isinstance(tree, int)]
    widest = max([min(SIBLINGS, max(sizes, default=0)), *map(most_children, shapes)])
    texts = force(decoder, call, outputs, acceptance, widest)
    shapes += [best_shape(texts, nodes) for nodes in sizes]
    plans = [_markov(texts, k, p_min, cost, seed) for p_min in p_mins for k in ks]
    plans += [_tree(texts, parents, cost, seed) for parents in shapes]
    plans += [_replayed(label, drafters, texts, samples, seed) for label, drafters in made]
    known = [t.expected for t in texts if decoder.draft is not None]
    return WhatIf(plans, float(np.concatenate(known).mean()) if known else None, texts)


def _check(acceptance: str, p_mins: Sequence[float], plans: Mapping[str, Sequence[Any]], has_draft: bool) -> None:
    """Raise SpecdecError for a rule without estimates, values out of range, and plans that need a draft model."""
    if acceptance not in RULES:
        raise SpecdecError(f"what_if: no estimate for the rule {acceptance!r}; known: {', '.join(RULES)}")
    for p_min in p_mins:
        check_number("what_if: p_mins", p_min, 0.0, 1.0)
    for k in plans["draft lengths"]:
        check_whole("what_if: ks", k, 1)
    for what, wanted in plans.items():
        if wanted and not has_draft:
            raise SpecdecError(f"what_if: {what} need a draft model: pass draft=... when the decoder is built")


def ngrams(texts: Sequence[Text], strategies: Any, n_max: int = 0, seed: int = 0) -> Plan:
    """A chain of strategies that read ids only, replayed on kept greedy (or seeded match / coupled) texts: no model.

    n_max: most tokens a round drafts (<= 0: no limit but the text's end). Exact; of strategies that share state between
    rows, for runs with batch_size=1.
    """
    chain = model_free_chain(strategies, max((len(t.prompt) + len(t.output) for t in texts), default=1))
    counts = []
    for text in texts:
        records = replay(chain, text.prompt, text.output, n_max)
        counts.append((len(text.output), len(records), sum(r.drafted for r in records)))
    return _plan(_label(strategies), None, None, np.array(counts, np.float64), seed)


def draft_lengths(confidence: np.ndarray, k: int, p_min: float, n_min: int = 0) -> np.ndarray:
    """Tokens proposed in a round that starts at each of n places, int64 [n]: at most k, one less than are left, and up
    to the first position from `n_min` on whose confidence is below p_min."""
    n = len(confidence)
    lengths = np.zeros(n, dtype=np.int64)
    for t in range(n):
        limit = min(k, n - t - 1)
        low = np.flatnonzero(confidence[t + n_min : t + limit] < p_min)
        lengths[t] = min(limit, n_min + int(low[0])) if len(low) else limit
    return lengths


def round_starts(weight: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """P(a round starts at each place of a text), float64 [n], where a round from t proposes lengths[t] tokens and each
    is accepted with its weight if all before it are."""
    n = len(weight)
    starts = np.zeros(n + 1)
    starts[0] = 1.0
    for t in range(n):
        survival = starts[t]
        for m in range(lengths[t]):
            starts[t + m + 1] += survival * (1.0 - weight[t + m])
            survival *= weight[t + m]
        starts[t + lengths[t] + 1] += survival
    return starts[:n]


def _markov(texts: Sequence[ForcedText], k: int, p_min: float, cost: Costs | None, seed: int) -> Plan:
    counts, steps = [], 0.0
    for text in texts:
        lengths = draft_lengths(text.confidence, k, p_min)
        starts = round_starts(text.weight, lengths)
        counts.append((len(text.output), starts.sum(), (starts * lengths).sum()))
        # The pass that shows a confidence below p_min is paid for, and proposes nothing.
        limits = np.minimum(k, len(lengths) - 1 - np.arange(len(lengths)))
        steps += float((starts * np.minimum(lengths + 1, limits)).sum()) if p_min else float(counts[-1][2])
    total = np.array(counts, np.float64)
    tokens, rounds, drafted = total.sum(axis=0).tolist()
    speedup = cost.speedup(tokens / rounds, steps / rounds, drafted / rounds) if cost is not None and rounds else None
    return _plan("draft-model", k, p_min, total, seed, speedup)


def _tree(texts: Sequence[ForcedText], parents: Parents, cost: Costs | None, seed: int) -> Plan:
    counts = [tree_counts(t.siblings, parents) for t in texts if t.siblings is not None]
    total = np.array(counts, np.float64)
    tokens, rounds, drafted = total.sum(axis=0).tolist()
    levels = max(depths_of(parents))
    speedup = cost.speedup(tokens / rounds, levels, drafted / rounds) if cost is not None and rounds else None
    shape = json.dumps(plan_of(parents)).replace(" ", "")
    return _plan(f"draft-model:tree={shape}", None, None, total, seed, speedup)


def _plan(chain: str, k: int | None, p_min: float | None, counts: np.ndarray, seed: int, speedup: Any = None) -> Plan:
    """counts [texts, 3]: tokens, rounds and drafted tokens of each text."""
    tokens, rounds, drafted = counts.sum(axis=0).tolist()
    if not rounds:
        return Plan(chain, k, p_min, 0, 0.0, 0.0, None, None, 0.0, None)
    found = ratio(counts[:, 0].tolist(), counts[:, 1].tolist(), seed=seed)
    ends, own = (found.low, found.high), tuple(map(tuple, counts.tolist()))
    return Plan(chain, k, p_min, round(tokens), rounds, tokens / rounds, *ends, drafted / rounds, speedup, own)


@dataclass
class _Forced(Drafter):
    """Stands in for `draft-model` in a replay: proposes what is written while its coin accepts, then something else."""

    n_max: int
    p_min: float
    n_min: int
    rng: np.random.Generator
    name: str = field(init=False, default="draft-model")
    text: ForcedText = field(init=False, repr=False)
    lengths: np.ndarray = field(init=False, repr=False)

    def fresh(self, context: DraftContext) -> Any:
        return self

    def read(self, text: ForcedText) -> None:
        """The text that is replayed next."""
        self.text = text
        self.lengths = draft_lengths(text.confidence, self.n_max, self.p_min, self.n_min)

    def begin(self, row: int, prompt: Tokens) -> None:
        return None

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._one(r) for r in requests]

    def _one(self, request: DraftRequest) -> Draft:
        t = request.position + 1 - len(self.text.prompt)
        length = int(self.lengths[t])
        right = self.rng.random(length) < self.text.weight[t : t + length]
        tokens = self.text.output[t : t + length].copy()
        tokens[~right] += 1  # any other id: what is rejected leaves no trace but its place
        return Draft(tokens.tolist(), None, None, self.name)


def _drafters(chain: Any, decoder: Any, argmax: bool) -> list[Any]:
    """The chain with stand-ins for the draft model. Raises SpecdecError for what is not covered."""
    drafters = make_drafters(chain, decoder.draft is not None)
    check_draft(drafters, decoder.draft)
    for i, drafter in enumerate(drafters):
        if drafter.name == "draft-model":
            if drafter.makes_trees or drafter.top_n is not None or drafter.translate or (argmax and drafter.n_min):
                raise SpecdecError(
                    "what_if covers draft-model with n_max and p_min: no trees (see trees=), top_n, translate, n_min"
                )
            drafters[i] = _Forced(drafter.n_max, drafter.p_min, drafter.n_min, np.random.default_rng(0))
        elif drafter.name in ("eagle3", "early-exit"):
            raise SpecdecError(f"what_if: strategy {drafter.name!r} needs a model of its own: it is not covered")
    return drafters


def _replayed(label: str, drafters: list[Any], texts: Sequence[ForcedText], samples: int, seed: int) -> Plan:
    models = [d for d in drafters if isinstance(d, _Forced)]
    sure = all(np.isin(t.weight, (0.0, 1.0)).all() for t in texts) or not models
    longest = max(len(t.prompt) + len(t.output) for t in texts)
    counts = np.zeros((len(texts), 3))
    times = 1 if sure else samples
    for sample in range(times):
        for model in models:
            model.rng = np.random.default_rng((seed, sample))
        chain = build_chain(drafters, DraftContext(1, longest, vocab_size=1 << 31, separate=True))
        for i, text in enumerate(texts):
            for model in models:
                model.read(text)
            records = replay(chain, text.prompt, text.output)
            counts[i] += (len(text.output), len(records), sum(r.drafted for r in records))
    return _plan(label, None, None, counts / times, seed)


def _label(chain: Any) -> str:
    if isinstance(chain, str):
        return chain
    parts = [c if isinstance(c, str) else str(getattr(c, "name", c)) for c in chain] if chain else []
    return ",".join(parts) or "none"


def measure_cost(decoder: Any, context: int = 256, widest: int = 8, repeats: int = 7) -> Costs:
    """Time passes at `context` tokens: a plain target pass, a draft step, and target passes of 2..widest + 1 tokens.

    Medians of `repeats`, batch 1, of the passes of calls (decoding/timing.py). Costs between measured widths are
    interpolated.
    """
    widths = sorted({1, 2, (widest + 1) // 2, widest + 1})
    context = max(1, min(context, room_for(decoder, widths)))
    seconds = measure_passes(decoder, (1,), (context,), widths, repeats)
    plain, draft = seconds["target", 1, context, 1], seconds.get(("draft", 1, context, 1), 0.0)
    extra = [seconds["target", 1, context, w] / plain - 1.0 for w in widths]
    return Costs(draft / plain, lambda drafted: float(np.interp(drafted + 1, widths, extra)))
