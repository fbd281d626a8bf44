"""Speculative decoding on one screen: one row, no cache, every distribution computed from scratch.

Algorithm 1 of Leviathan et al. (2023) with the engine's own random numbers: the engine must equal it token for token
(tests/decoding/test_reference.py). p is the target's distribution, q the draft's, V the vocabulary, n the tokens
known so far. It has the rules leviathan, match and coupled. To change the algorithm, change it here first, then in
decoding/acceptance.py (steps 3 and 4) or decoding/engine.py (the loop). `race` samples: argmin of exponential noise /
weight (Gumbel's trick), so the same noise over similar weights mostly gives the same token.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.sampling.sampling import Purpose, Sampling, fold_int, race, row_key, streams, uniform


@torch.no_grad()
def generate(
    target: Any, draft: Any, prompt: Sequence[int], max_new_tokens: int, *, k: int = 4, rule: str = "leviathan",
    temperature: float = 0.0, seed: int = 0, row: int = 0, eos: Collection[int] = (),
) -> list[int]:  # fmt: skip
    """The tokens that `SpeculativeDecoder` generates in row `row` with `DraftModel(n_max=k)`; temperature 0: greedy."""
    sampling, key, rounds = Sampling(temperature), row_key(seed, row), 0
    ids, end = list(prompt), len(prompt) + max_new_tokens
    while len(ids) < end:
        n = len(ids)

        # 1 draft: x_i ~ q_i, a pass of the draft for each; a round emits one token more than it accepts
        noise = (key, Purpose.SAMPLE) if rule == "coupled" else (fold_int(key, rounds), Purpose.DRAFT)
        x: list[int] = []
        q: list[Tensor] = []
        for i in range(min(k, end - n - 1)):
            q.append(distributions(draft, ids + x, sampling)[-1])  # [V]
            x.append(int(q[i].argmax()) if rule == "match" else sample(q[i], stream(noise[0], n + i, noise[1])))

        # 2 verify: all p in one pass of the target
        p = distributions(target, ids + x, sampling)[n - 1 :]  # [len(x) + 1, V]

        # 3 accept: while coin * q < p, or, by the other rules, while the target's own sample is the drafted token
        own = [sample(p[i], stream(key, n + i, Purpose.SAMPLE)) for i in range(len(p))]
        coin = [uniform(stream(key, n + i, Purpose.ACCEPT)) for i in range(len(p))]
        by_ratio = [bool(coin[i] * q[i][x[i]] < p[i][x[i]]) for i in range(len(x))]
        is_accepted = by_ratio if rule == "leviathan" else [own[i] == x[i] for i in range(len(x))]
        accepted = [*is_accepted, False].index(False)

        # 4 one more token: from the residual after a rejection, else the bonus token
        token = own[accepted]
        if rule == "leviathan" and accepted < len(x):
            residual = (p[accepted] - q[accepted]).clamp(min=0)
            weights = residual / residual.sum() if residual.sum() > 0 else p[accepted]
            token = sample(weights, stream(key, n + accepted, Purpose.RESIDUAL))

        # 5 commit: the accepted tokens and one more are kept, the rejected ones forgotten; the text ends at an EOS
        ids, rounds = [*ids, *x[:accepted], token], rounds + 1
        for i in range(n, len(ids)):
            if ids[i] in eos:
                return ids[len(prompt) : i + 1]
    return ids[len(prompt) :]


def distributions(model: Any, ids: Sequence[int], sampling: Sampling) -> Tensor:
    """The model's distribution after every prefix of ids, [len(ids), V]; greedy: all of it on the argmax."""
    scores = sampling.scores(model(input_ids=torch.tensor([ids]), use_cache=False).logits)[0]
    if sampling.greedy:
        return torch.nn.functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).float()
    return torch.softmax(scores, dim=-1)


def stream(key: int, position: int, purpose: Purpose) -> Tensor:
    """Where the random numbers for the token at `position` come from."""
    return streams(torch.tensor(key), torch.tensor(position), purpose)


def sample(weights: Tensor, stream: Tensor) -> int:
    """Draw a token from weights [V]."""
    return int(race(weights, stream))
