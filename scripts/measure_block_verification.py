"""Block verification against token-wise acceptance: the paper's example, and the gain by draft length and temperature.

    python scripts/measure_block_verification.py --out results/block_verification.json
    python scripts/write_results.py    # the tables of docs/validation.md

`example`: Sun et al. 2025, section 2, enumerated with the engine's own acceptance probabilities.
`rounds`: fresh rounds of the embedded pair. A draft of 15 tokens is sampled at each context; both rules' expected
accepted tokens, given that draft, are known without a coin, for its first n tokens for every n. Paired by draft,
intervals over the files that the contexts are from.
`calls`: whole calls with either rule, the same prompts, paired by prompt. Texts differ, so intervals are wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import torch
from measure_trees import started
from torch import Tensor

from specdec import DraftModel, SpeculativeDecoder
from specdec.decoding.acceptance import Block
from specdec.decoding.block_verification import block_acceptance, prefix_weights
from specdec.files.compact_json import write_json
from specdec.research.bench import origin
from specdec.research.bootstrap import difference
from specdec.sampling.sampling import Sampling

LENGTHS, TEMPERATURES = range(1, 16), (0.3, 0.6, 1.0)
RUN_LENGTHS = (1, 2, 4, 8, 15)
DRAFTS, NEW_TOKENS = 32, 48  # drafts sampled at each context, tokens of a run's row
Sums = tuple[Sequence[float], Sequence[float]]


def expected_lengths(p: Tensor, q: Tensor, drafts: Tensor) -> np.ndarray:
    """Expected accepted tokens of the first 1, 2, ... k tokens of each draft, by block verification and token by token.

    p [n, k + 1, V], q [n, k, V], drafts [n, k] -> [2, n, k]
    """
    n, k = drafts.shape
    ones = torch.ones(n, dtype=torch.int64)
    block = Block(
        scores=p.log(),
        draft=torch.nn.functional.pad(drafts, (0, 1)),
        lengths=ones * k,
        totals=ones * k,
        final=torch.ones(n, dtype=torch.bool),
        keys=ones,
        positions=ones,
        sampling=Sampling(1.0),
        q=torch.nn.functional.pad(q, (0, 0, 0, 1)),
        has_q=torch.ones(n, dtype=torch.bool),
    )
    chance = block_acceptance(block).double().clamp(max=1)  # a quotient by 0 is "surely" to the rule
    weights = prefix_weights(block).double()
    ratio = (p[:, :k].gather(2, drafts[..., None]) / q.gather(2, drafts[..., None]))[..., 0].double()
    found = []
    for i in range(k):  # a draft that ends here: its last token is accepted with the whole weight
        own = torch.cat([chance[:, :i], weights[:, i + 1, None]], dim=1)
        shorter = (1 - own).flip(1).cumprod(1)  # no prefix of so many tokens or more is accepted
        found.append(torch.stack([(1 - shorter).sum(1), ratio[:, : i + 1].clamp(max=1).cumprod(1).sum(1)]))
    return torch.stack(found, dim=2).numpy()


def example() -> dict[str, Any]:
    """The paper's two-token example, over all drafts."""
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    drafts = torch.tensor(list(product(range(2), repeat=2)))
    lengths = expected_lengths(p.expand(4, 3, 2), q.expand(4, 2, 2), drafts)
    weights = q[drafts].prod(dim=1).double().numpy()
    block, token = (float(weights @ found[:, -1]) for found in lengths)
    names = [str(Fraction(x).limit_denominator(1000)) for x in (block, token)]
    return {"block": names[0], "token": names[1], "block_value": block, "token_value": token}


@torch.no_grad()
def sampled(decoder: SpeculativeDecoder, prompt: list[int], temperature: float, seed: int) -> tuple[Tensor, ...]:
    """Sample drafts of k tokens after a prompt: p [n, k + 1, V], q [n, k, V] and the drafts [n, k]."""
    assert decoder.draft is not None
    generator, contexts = torch.Generator().manual_seed(seed), torch.tensor([prompt]).expand(DRAFTS, -1)
    cache, newest, drafts, q = None, contexts, [], []
    for _ in LENGTHS:
        out = decoder.draft.model(input_ids=newest, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        q.append(torch.softmax(out.logits[:, -1].float() / temperature, dim=-1))
        newest = torch.multinomial(q[-1], 1, generator=generator)
        drafts.append(newest)
    ids = torch.cat([contexts, *drafts], dim=1)
    logits = decoder.target.model(input_ids=ids, use_cache=False, logits_to_keep=len(q) + 1).logits
    return torch.softmax(logits.float() / temperature, dim=-1), torch.stack(q, dim=1), torch.cat(drafts, dim=1)


def rounds(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Tokens per round by length and temperature: accepted tokens and one more."""
    entries = []
    for temperature in TEMPERATURES:
        found = [expected_lengths(*sampled(decoder, prompt, temperature, i)) for i, prompt in enumerate(prompts)]
        values = 1 + np.array(found).mean(axis=2)  # [prompts, 2, lengths]
        ones = np.ones(len(prompts)).tolist()
        for i, k in enumerate(LENGTHS):
            block, token = (values[:, rule, i].tolist() for rule in range(2))
            entries.append(entry(k, temperature, (block, ones), (token, ones)))
    return entries


def entry(k: int, temperature: float, block: Sums, token: Sums) -> dict[str, Any]:
    """Tokens per round of both rules, each given as tokens and rounds by prompt, and the paired difference."""
    values = [sum(top) / sum(bottom) for top, bottom in (block, token)]
    gain = difference(block, token).to_dict()
    made = {"n_max": k, "temperature": temperature, "block": values[0], "token": values[1], "gain": gain}
    print(made, flush=True)
    return made


def calls(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Tokens per round of whole calls under both rules."""
    entries = []
    for temperature, k in product(TEMPERATURES, RUN_LENGTHS):
        sums = []
        for rule in ("block", "leviathan"):
            out = decoder.generate(
                prompts,
                NEW_TOKENS,
                [DraftModel(n_max=k)],
                acceptance=rule,
                temperature=temperature,
                seed=k,
                ignore_eos=True,
                batch_size=len(prompts),
            )
            rows = out.stats.to_dict()["rows"]
            sums.append(([r["generated_tokens"] for r in rows], [r["rounds"] for r in rows]))
        entries.append(entry(k, temperature, *sums))
    return entries


def main() -> None:
    out, decoder, prompts = started(__doc__)
    made = {"example": example(), "rounds": rounds(decoder, prompts), "calls": calls(decoder, prompts)}
    sizes = {"contexts": len(prompts), "drafts": DRAFTS, "new_tokens": NEW_TOKENS}
    write_json(out, {"benchmark": "block verification", **origin(), **sizes, **made})


if __name__ == "__main__":
    main()
