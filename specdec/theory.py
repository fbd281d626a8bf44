"""Formulas for what speculative decoding can gain: acceptance, tokens per round and speed-up.

Symbols, as in Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023):

    p, q   distributions of the next token under target and draft over a vocabulary of V tokens, `[..., V]`
    a      acceptance of a *tested* draft token, in [0, 1]: a token after a rejected one is not tested, so `a` is not
           accepted / drafted
    k      draft length, tokens
    c      time of one draft step / time of a plain (1-wide) target pass
    v      extra time of the (k+1)-wide verification pass over a plain pass, in plain passes

Every function takes floats, numpy arrays (or lists) and torch tensors, computes in float64, broadcasts, and returns a
tensor if any argument is one, an array if any is an array, else a float. Values out of range raise `SpecdecError`.

Estimates from one plain text
-----------------------------
Given a text x that the *target* sampled, what would speculation have done on it? Speculative sampling emits a token at
position i as an accepted draft or as a correction, and the two together have distribution p_i. Under `leviathan` the
accepted part is q_i(x) min(1, p_i(x) / q_i(x)) = min(p_i(x), q_i(x)), hence

    P(accepted | x_i was emitted at a tested position i) = min(p_i(x_i), q_i(x_i)) / p_i(x_i)
                                                         = min(1, q_i(x_i) / p_i(x_i))  =: w_i

and, because q_i depends only on the tokens before i and every test has its own random number, the tests along a given
text are independent. So P(a round from position t accepts at least m drafts | x) = w_t w_{t+1} ... w_{t+m-1}, and its
mean over texts x ~ p is the true probability, without bias:

    E_{x ~ p} prod_j min(1, q_j(x_j) / p_j(x_j)) = sum_x prod_j min(p_j(x_j), q_j(x_j)) = P(N >= m).

The tempting alternative, the product of 1 - TV(p_j, q_j) along the text, is right for m = 1 only: from the second
position on it takes prefixes from p, while accepted prefixes follow min(p, q) / (1 - TV), that is, they prefer contexts
where the draft was good. From one teacher-forced pass of each model and for any k, `realised_acceptance` computes w for
every rule, `accepted_length_from_text` the mean accepted drafts from every start, and `expected_rounds_from_text` the
rounds of a whole run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from specdec.errors import SpecdecError
from specdec.files.fields import is_tensor

if TYPE_CHECKING:
    import torch

Values: TypeAlias = Any  # a float, a sequence of floats, a numpy array or a torch tensor
RULES = ("leviathan", "match", "coupled")
PROPOSALS = ("sample", "argmax")  # the names that acceptance rules use
SUM_TOLERANCE = 1e-3  # how far the sum of a probability row may be from 1: float32 softmax over 256k tokens, with room


def tokens_per_round(a: Values, k: Values) -> Values:
    """Return the expected tokens of one round, accepted drafts plus one: (1 - a^(k+1)) / (1 - a), and k + 1 at a = 1.

    Assumes that every tested token is accepted with the same probability `a`, independently.
    Source: Leviathan et al. 2023, equation 1.
    """
    return _answer(_tokens_per_round(_in_range("a", a, 0.0, 1.0), _whole("k", k)), a, k)


def accepted_per_round(a: Values, k: Values) -> Values:
    """Return the expected accepted drafts of one round: `tokens_per_round` - 1 = a (1 - a^k) / (1 - a); k at a = 1."""
    rate = _in_range("a", a, 0.0, 1.0)
    # a (1 + a + ... + a^(k-1)) keeps the digits that subtracting 1 would lose for small a; at k = 0 the sum is empty.
    return _answer(rate * _tokens_per_round(rate, _whole("k", k) - 1.0), a, k)


def speedup(a: Values, k: Values, c: Values, v: Values = 0.0) -> Values:
    """Return the expected speed relative to plain decoding: tokens per round / (1 + k c + v).

    `c` and `v` are times in units of a plain target pass; `c` >= 0, and `v` > -1 (a measured `v` may be slightly
    negative). Source: Leviathan et al. 2023, theorem 3.8, with the cost `v` of the wide pass added.
    """
    cost = 1.0 + _whole("k", k) * _in_range("c", c, 0.0, np.inf) + _in_range("v", v, -1.0, np.inf, open_low=True)
    return _answer(_tokens_per_round(_in_range("a", a, 0.0, 1.0), _whole("k", k)) / cost, a, k, c, v)


def best_k(a: float, c: float, v: float | Sequence[float] | Callable[[int], float] = 0.0, k_max: int = 16) -> int:
    """Return the draft length in 0..k_max with the largest `speedup`; 0: drafting does not pay.

    `v` is one number for every k >= 1, a sequence indexed by k (`v[0]` is not used), or a function of k. Plain
    decoding, k = 0, counts as exactly 1. Among equals the shortest draft wins.
    """
    longest = int(_whole("k_max", k_max).item())
    best, best_gain = 0, 1.0
    for k in range(1, longest + 1):
        gain = float(speedup(a, k, c, _width_cost(v, k)))
        if gain > best_gain:
            best, best_gain = k, gain
    return best


@dataclass(frozen=True)
class Costs:
    """Costs of passes, in units of a plain target pass.

    draft: a draft step, the `c` of `speedup`
    wide: n -> extra cost of a pass over drafts of n tokens, the `v` of `speedup`
    """

    draft: float = 0.0
    wide: Callable[[float], float] = lambda drafted: 0.0

    def of_round(self, steps: float, drafted: float, share: float = 1.0) -> float:
        """Return the mean cost of rounds with `steps` draft steps, a `share` of them with `drafted` tokens."""
        return 1.0 + steps * self.draft + share * self.wide(drafted)

    def speedup(self, tokens: float, steps: float, drafted: float, share: float = 1.0) -> float:
        """Return the speed relative to plain decoding of rounds with `tokens` on average; the rest as in `of_round`."""
        return tokens / self.of_round(steps, drafted, share)

    def best_k(self, a: float, k_max: int = 16) -> int:
        """Return `best_k` at these costs."""
        return best_k(a, self.draft, self.wide, k_max)


def expected_acceptance(p: Values, q: Values, rule: str = "leviathan", proposal: str | None = None) -> Values:
    """Return the probability that a draft token proposed from `q` is accepted by a target with distribution `p`.

    p, q: probabilities `[..., V]` after all processors, rows summing to 1.
    rule: `leviathan`: sum_x min(p, q) = 1 - TV(p, q).
        `match` (the target is sampled, the draft token must equal the sample): sum_x p q.
        `coupled` (target and draft sample with the same Gumbel noise): sum_x 1 / sum_y max(p_y/p_x, q_y/q_x), at
        least (1 - TV) / (1 + TV). Moulton and Jiang, "Maximally Consistent Sampling and the Jaccard Index of
        Probability Distributions" (2018); Daliri, Musco and Suresh, "Coupling without Communication and
        Drafter-Invariant Speculative Decoding" (2024).
    proposal: `sample` (sampled from q), or `argmax` (of q), for which every rule accepts with probability
        p(argmax q). None: what `draft-model` does, `argmax` under `match` and `sample` under the two others.
    returns: acceptance `[...]` in [0, 1]
    """
    both = _distributions(p, q)
    return _answer(_expected(*both, rule, _proposal(rule, proposal)).clamp(0.0, 1.0), p, q)


def realised_acceptance(
    p: Values, q: Values, tokens: Values, rule: str = "leviathan", proposal: str | None = None
) -> Values:
    """Return the probability w that a tested draft was accepted, given that `tokens` were emitted (module docstring).

    P(accepted and x emitted) / p(x): min(1, q(x) / p(x)) under `leviathan`, q(x) under `match`,
    1 / sum_y max(p_y, q_y p_x / q_x) under `coupled`, and 1 where x = argmax q, else 0, for `argmax` proposals. Its
    mean over x ~ p is `expected_acceptance`.

    p, q: probabilities `[..., V]`; at every position given the text's own prefix (teacher-forced).
    tokens: ids `[...]` in 0..V-1, sampled from p.
    returns: weights `[...]` in [0, 1]
    Raises SpecdecError for a token of probability 0 under p: it was not sampled from p.
    """
    import torch

    target, draft = _distributions(p, q)
    ids = torch.as_tensor(np.asarray(tokens) if isinstance(tokens, list | tuple) else tokens, device=target.device)
    if ids.shape != target.shape[:-1] or ids.is_floating_point() or ids.is_complex():
        raise SpecdecError(
            f"tokens: expected ids of shape {tuple(target.shape[:-1])}, got {tuple(ids.shape)} {ids.dtype}"
        )
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= target.shape[-1]):
        raise SpecdecError(f"tokens: ids must be in 0..{target.shape[-1] - 1}")
    at = ids.long().unsqueeze(-1)
    if bool((target.gather(-1, at) == 0).any()):
        raise SpecdecError("tokens: a token has probability 0 under p, so it was not sampled from p")
    return _answer(_realised(target, draft, at, rule, _proposal(rule, proposal)).clamp(0.0, 1.0), p, q, tokens)


def accepted_length_from_text(weights: Values, k: int) -> Values:
    """Return the mean accepted drafts of a round of k, from every start in a text: sum_{m=1..k} w_t ... w_{t+m-1}.

    weights: `realised_acceptance` along the text, `[..., n]`.
    k: draft length, 1..n.
    returns: `[..., n - k + 1]`, one number for each start that k tokens of text follow. Its mean is unbiased for rounds
        that start at these positions; add 1 for tokens per round. Rounds of a real run do not start uniformly: use
        `expected_rounds_from_text` for those.
    """
    w, length = _weights(weights), int(_whole("k", k).item())
    if not 1 <= length <= w.shape[-1]:
        raise SpecdecError(f"k: must be 1..{w.shape[-1]}, the number of weights, got {length}")
    survival = w.unfold(-1, length, 1).cumprod(-1)  # [..., n - k + 1, k]
    return _answer(survival.sum(-1), weights)


def expected_rounds_from_text(weights: Values, k: int) -> Values:
    """Return the expected rounds in which drafts of k tokens emit a text of n tokens.

    Conditional on the text, round starts are a Markov chain: a round from t that accepts m drafts emits m + 1 tokens,
    and the next one starts at t + m + 1. Averaged over texts x ~ p this is exactly the expected number of rounds of a
    real run of n tokens. n / rounds is the number of tokens per round, `rounds` (1 + k c + v) / n the time per token.

    weights: `realised_acceptance` along the text, `[..., n]`.
    k: draft length >= 0; 0 gives n.
    returns: rounds `[...]`
    """
    import torch

    w, length = _weights(weights), int(_whole("k", k).item())
    n = w.shape[-1]
    if length == 0:
        return _answer(w.new_full(w.shape[:-1], float(n)), weights)
    padded = torch.cat([w, w.new_zeros((*w.shape[:-1], length))], -1)  # what is beyond the end starts no round
    window = padded.unfold(-1, length, 1)[..., :n, :]  # [..., n, k]
    survival = torch.cat([torch.ones_like(window[..., :1]), window.cumprod(-1)], -1)  # P(N >= m), [..., n, k + 1]
    exactly = torch.cat([survival[..., :-1] * (1.0 - window), survival[..., -1:]], -1)  # P(N = m)
    starts = w.new_zeros((*w.shape[:-1], n + length + 1))  # P(a round starts at t)
    starts[..., 0] = 1.0
    for t in range(n):
        starts[..., t + 1 : t + length + 2] += starts[..., t : t + 1] * exactly[..., t, :]
    return _answer(starts[..., :n].sum(-1), weights)


def conditional_acceptance_from_histogram(histogram: Values) -> np.ndarray:
    """Return the acceptance of a tested token by its position in the draft, from counts of rounds.

    histogram: `[k + 1]`, entry n = rounds that accepted n of k drafts, when every draft had length k; or
        `[k + 1, k + 1]`, entry (m, n) = rounds with a draft of m tokens of which n were accepted.
    returns: float64 `[k]`, entry i = rounds that accepted position i / rounds that tested it (that accepted all before
        it and had a draft longer than i); NaN where no round did
    """
    accepted, tested = _position_counts(histogram)
    return np.divide(accepted, tested, out=np.full(len(tested), np.nan), where=tested > 0)


def pooled_acceptance_from_histogram(histogram: Values) -> float:
    """Return one `a` for all positions: accepted / tested tokens, the maximum-likelihood estimate; NaN if none.

    `histogram` as in `conditional_acceptance_from_histogram`. With drafts of one length, `accepted_per_round` of this
    `a` need not be the measured mean: it is when acceptance does not depend on the position.
    """
    accepted, tested = _position_counts(histogram)
    return float(accepted.sum() / tested.sum()) if tested.sum() > 0 else float("nan")


def _tokens_per_round(a: np.ndarray, k: np.ndarray) -> np.ndarray:
    a, k = np.broadcast_arrays(a, k)
    # log1p and expm1 keep full precision next to a = 1, where 1 - a^(k+1) cancels; at k = -1 the sum is empty.
    with np.errstate(divide="ignore", invalid="ignore"):
        sum_of_powers = -np.expm1((k + 1.0) * np.log1p(a - 1.0)) / (1.0 - a)
    return np.where(k == -1.0, 0.0, np.where(a == 1.0, k + 1.0, sum_of_powers))


def _width_cost(v: float | Sequence[float] | Callable[[int], float], k: int) -> float:
    if callable(v):
        return float(v(k))
    if np.ndim(v) == 0:
        return float(v)  # type: ignore[arg-type]
    if k >= len(v):  # type: ignore[arg-type]
        raise SpecdecError(f"v: too few entries, none for k = {k}; give one for every k in 0..k_max")
    return float(v[k])  # type: ignore[index]


def _proposal(rule: str, proposal: str | None) -> str:
    if rule not in RULES:
        raise SpecdecError(f"rule: unknown acceptance rule {rule!r}; known: {', '.join(RULES)}")
    chosen = proposal or ("argmax" if rule == "match" else "sample")
    if chosen not in PROPOSALS:
        raise SpecdecError(f"proposal: unknown kind {proposal!r}; known: {', '.join(PROPOSALS)}")
    return chosen


def _expected(p: torch.Tensor, q: torch.Tensor, rule: str, proposal: str) -> torch.Tensor:
    if proposal == "argmax":
        return p.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1)
    if rule == "leviathan":
        return p.minimum(q).sum(-1)
    if rule == "match":
        return (p * q).sum(-1)
    return coupled_joint(p, q).sum(-1)


def _realised(p: torch.Tensor, q: torch.Tensor, at: torch.Tensor, rule: str, proposal: str) -> torch.Tensor:
    if proposal == "argmax":
        return (at == q.argmax(-1, keepdim=True)).squeeze(-1).to(p.dtype)
    p_x, q_x = p.gather(-1, at).squeeze(-1), q.gather(-1, at).squeeze(-1)
    if rule == "leviathan":
        return p_x.minimum(q_x) / p_x
    if rule == "match":
        return q_x
    return coupled_joint(p, q).gather(-1, at).squeeze(-1) / p_x


def coupled_joint(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Compute P(target and draft both pick x) = 1 / sum_y max(p_y/p_x, q_y/q_x), `[..., V]`, in O(V log V).

    With r = q / p the maximum is p_y/p_x where r_y <= r_x and q_y/q_x where r_y > r_x, so that in the order of r the
    sum is a prefix sum of p over p_x plus a suffix sum of q over q_x. Among equal r both terms are the same.
    """
    import torch

    ratio = torch.where(q == 0, torch.zeros_like(q), q / p)  # inf where p = 0 < q
    order = ratio.argsort(-1)
    p_sorted, q_sorted = p.gather(-1, order), q.gather(-1, order)
    below = p_sorted.cumsum(-1)
    above = q_sorted.flip(-1).cumsum(-1).flip(-1) - q_sorted
    joint = 1.0 / (below / p_sorted + above / q_sorted)
    joint = torch.where((p_sorted > 0) & (q_sorted > 0), joint, torch.zeros_like(joint))
    return torch.zeros_like(joint).scatter(-1, order, joint)


def _position_counts(histogram: Values) -> tuple[np.ndarray, np.ndarray]:
    """Count rounds that accepted position i, and rounds that tested it, float64 `[k]` each."""
    h = np.asarray(histogram.detach().cpu() if is_tensor(histogram) else histogram, dtype=np.float64)
    if h.ndim == 1 and h.size:
        h = np.concatenate([np.zeros((len(h) - 1, len(h))), h[None]])
    if h.ndim != 2 or h.shape[0] != h.shape[1] or not h.size:
        raise SpecdecError(f"histogram: expected [k + 1] or [k + 1, k + 1] counts, got shape {h.shape}")
    if not np.isfinite(h).all() or (h < 0).any() or np.triu(h, 1).any():
        raise SpecdecError("histogram: counts must be >= 0, and none may accept more tokens than were drafted")
    k = len(h) - 1
    accepted = np.array([h[:, i + 1 :].sum() for i in range(k)])
    tested = np.array([h[i + 1 :, i:].sum() for i in range(k)])
    return accepted, tested


def _weights(value: Values) -> torch.Tensor:
    import torch

    w = torch.from_numpy(_in_range("weights", value, 0.0, 1.0))
    if w.ndim == 0 or w.shape[-1] == 0:
        raise SpecdecError(f"weights: expected numbers [..., n], got shape {tuple(w.shape)}")
    return w


def _tensor(name: str, value: Values, device: torch.device | str) -> torch.Tensor:
    import torch

    return (value.detach().double() if is_tensor(value) else torch.from_numpy(_array(name, value))).to(device)


def _array(name: str, value: Values) -> np.ndarray:
    """Numbers as float64 on the host."""
    try:
        if is_tensor(value):
            return np.asarray(value.detach().cpu().double().numpy())
        found = np.asarray(value)
        if found.dtype.kind not in "biuf":
            raise TypeError
        return found.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecdecError(f"{name}: expected numbers, got {type(value).__name__}") from error


def _in_range(name: str, value: Values, low: float, high: float, open_low: bool = False) -> np.ndarray:
    x = _array(name, value)
    inside = (x > low if open_low else x >= low) & (x <= high) & np.isfinite(x)
    if not inside.all():
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise SpecdecError(f"{name}: must be in {interval}, got {x[~inside].flat[0]:g}")
    return x


def _whole(name: str, value: Values) -> np.ndarray:
    x = _in_range(name, value, 0.0, np.inf)
    if (x != np.floor(x)).any():
        raise SpecdecError(f"{name}: must be a whole number >= 0, got {x[x != np.floor(x)].flat[0]:g}")
    return x


def _distributions(p: Values, q: Values) -> tuple[torch.Tensor, torch.Tensor]:
    device = p.device if is_tensor(p) else q.device if is_tensor(q) else "cpu"
    target, draft = _tensor("p", p, device), _tensor("q", q, device)
    for name, rows in (("p", target), ("q", draft)):
        if rows.ndim == 0 or rows.shape[-1] == 0:
            raise SpecdecError(f"{name}: expected probabilities [..., V], got shape {tuple(rows.shape)}")
        if not bool((rows >= 0.0).all()):  # also catches NaN
            raise SpecdecError(f"{name}: probabilities must be >= 0, got a negative number or NaN")
        excess = (rows.sum(-1) - 1.0).abs().max() if rows.numel() else rows.new_zeros(())
        if not bool(excess <= SUM_TOLERANCE):
            raise SpecdecError(f"{name}: every row must sum to 1, one is off by {float(excess):g}")
    if target.shape != draft.shape:
        raise SpecdecError(f"p and q: shapes {tuple(target.shape)} and {tuple(draft.shape)} differ")
    return target, draft


def _answer(result: Any, *arguments: Values) -> Values:
    """Return `result`, an array or a tensor, as a tensor, an array or a float, as the arguments are."""
    tensors = [x for x in arguments if is_tensor(x)]
    if tensors:
        return sys.modules["torch"].as_tensor(result).to(tensors[0].device)
    if result.ndim == 0 and not any(isinstance(x, np.ndarray) for x in arguments):
        return float(result)
    return np.asarray(result)
