"""`specdec compare`: several drafts and strategies for one target on the same prompts, ranked, with reasons.

Built on the ablation runner: every candidate is a cell, plain decoding runs beside it, and the equality gate applies.
What is measured is joined with what explains it: one teacher-forced pass of target and draft over the plain texts gives
p and q at every position, so that agreement, entropy and context can be looked at apart from any drafting round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.decoder import SpeculativeDecoder
from specdec.device.transfer import to_device
from specdec.drafters import make_drafters
from specdec.drafters.base import pad_vocabulary
from specdec.errors import SpecdecError
from specdec.research.ablation.config import PLAIN, AblationConfig, Cell
from specdec.research.ablation.merge import merge
from specdec.research.ablation.runner import Progress, run_ablation
from specdec.research.ablation.store import Store, read_checked
from specdec.research.ablation.summary import by_setting, setting_figures, theoretical_speedup
from specdec.research.ablation.table import Row, as_rows

ALONE = "no draft"  # the pair of strategies that need no draft model
EXAMINED = 16  # prompts of the teacher-forced passes
LONGEST_K = 16
# Where a figure becomes a reason. Shares and differences of acceptance.
LARGE_DRAFT, LOW_AGREEMENT, ENTROPY_GAP, CONTEXT_DROP, OVERCONFIDENT, OUTSIDE = 1 / 3, 0.6, 0.2, 0.1, 0.67, 0.1


def compare_config(
    target: str, drafts: Sequence[str], strategies: Sequence[str] = (), k: int = 5, prompts: Sequence[str] = (),
    data: Mapping[str, Any] | None = None, loading: Mapping[str, Any] | None = None, **generation: Any,
) -> AblationConfig:  # fmt: skip
    """The ablation behind a comparison: `draft-model` of `k` tokens with every draft, and the strategies, which need
    none. Raises SpecdecError for a comparison of nothing, of one thing with itself, or of a chain with a draft."""
    if not drafts and not strategies:
        raise SpecdecError("compare: nothing to compare: give drafts or strategies")
    if len(set(drafts)) < len(drafts) or len(set(strategies)) < len(strategies):
        raise SpecdecError("compare: a draft or a strategy is named twice")
    for text in strategies:
        if any(d.name == "draft-model" for d in make_drafters(text, has_draft=False)):
            raise SpecdecError("compare: strategies are compared without a draft model: name drafts by themselves")
    shared = dict(loading or {})
    names = _names(drafts)
    pairs = {name: {**shared, "target": target, "draft": draft} for name, draft in zip(names, drafts, strict=True)}
    if strategies:
        pairs[ALONE] = {"target": target, **{k: v for k, v in shared.items() if not k.startswith("draft_")}}
    cells = [{"pair": name, "strategies": "draft-model"} for name in names]
    cells += [{"pair": ALONE, "strategies": text} for text in strategies]
    chains: dict[str, Any] = {text: [text] for text in strategies}
    if drafts:
        chains["draft-model"] = [{"name": "draft-model", "n_max": k}]
    return AblationConfig(
        pairs=pairs, strategies=chains, prompts=tuple(prompts) or None, data=dict(data or {}), generation=generation,
        axes={"strategies": [PLAIN]}, cells=tuple(cells),
    )  # fmt: skip


def _names(drafts: Sequence[str]) -> list[str]:
    """The last part of each draft's name where that tells them apart."""
    short = [Path(draft).name for draft in drafts]
    return short if len(set(short)) == len(short) else list(drafts)


def compare(config: AblationConfig, out: Path, progress: Progress = lambda what: None) -> dict[str, Any]:
    """Run what is missing in `out`, and rank. Plain data: `candidates` from the fastest to the slowest, `gate`."""
    run_ablation(config, out, progress=progress, examine=examine)
    summary = merge(out)
    assert summary is not None  # one process ran all rows
    store = Store(out)
    store.read()
    facts = {cell["pair"]: store.facts.get(cell["key"]) for cell in reversed(read_checked(out)["cells"])}
    rows = as_rows(out)
    groups = {name: group for name, group in by_setting(rows).items() if group[0]["drafts"]}
    made = [candidate(group, rows, facts.get(group[0]["pair"])) for group in groups.values()]
    made.sort(key=lambda c: -((c["decode_speedup"] or {}).get("value") or 0.0))
    return {**{k: summary[k] for k in ("date", "commit", "versions", "machine", "gate", "errors")}, "candidates": made}


def candidate(group: Sequence[Row], rows: Sequence[Row], facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """One draft or strategy: its figures, what theory makes of them, and the reasons that fit."""
    figures = setting_figures(group, rows)
    costs = figures.get("costs")
    depth = max((len(r["tested"]) for r in group), default=0)
    counts = [[sum(_at(r[name], i) for r in group) for name in ("reached", "tested")] for i in range(depth)]
    categories = dict.fromkeys(r["category"] for r in group)
    head = group[0]
    # What a strategy without a model drafts is decided by the text: it has no length to choose.
    best, gain = best_length(costs if head["pair"] != ALONE else None)
    made = {
        "name": head["pair"] if head["pair"] != ALONE else head["strategies"], "pair": head["pair"], **figures,
        "acceptance_by_position": [a / t if t else None for a, t in counts],
        "acceptance_by_category": {c: _pooled([r for r in group if r["category"] == c]) for c in categories},
        "cost_ratio": costs["draft_cost"] if costs else None, "best_length": best, "best_length_speedup": gain,
        "facts": facts if head["pair"] != ALONE else None,
    }  # fmt: skip
    return {**made, "reasons": reasons(made)}


def best_length(costs: Mapping[str, float] | None) -> tuple[int | None, float | None]:
    """The draft length that theory advises and the speed-up that it predicts there; 0 = do not draft, None = no draft
    was ever made."""
    if costs is None or not costs["drafted_share"]:
        return None, None
    gains = {0: 1.0, **{k: theoretical_speedup(costs, k) for k in range(1, LONGEST_K + 1)}}
    best = max(gains, key=lambda k: (gains[k], -k))
    return best, gains[best]


def _at(values: Sequence[int], index: int) -> int:
    return values[index] if index < len(values) else 0


def _pooled(rows: Sequence[Row]) -> float | None:
    tested = sum(r["tested_tokens"] for r in rows)
    return sum(r["accepted_tokens"] for r in rows) / tested if tested else None


# -- what explains it -------------------------------------------------------------------------------------------------


def examine(
    decoder: SpeculativeDecoder, cells: Sequence[Cell], encoded: Mapping[str, Any],
    rows: Mapping[tuple[str, str], Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Facts about a pair: sizes, vocabularies, templates, and the two laws along the plain texts."""
    report, draft = decoder.report, decoder.draft
    tokenizers = [getattr(t, "chat_template", None) for t in (decoder.tokenizer, decoder.draft_tokenizer)]
    facts: dict[str, Any] = {
        "size_ratio": report.size_ratio, "vocabulary": report.vocabulary,
        "same_template": tokenizers[0] == tokenizers[1],
        "context": decoder.target.context, "draft_context": draft.context if draft is not None else None,
        "longest_text": 0, "laws": None,
    }  # fmt: skip
    plain = next((cell for cell in cells if not cell.strategies), None)
    found: list[Laws] = []
    for name, ids in list(encoded.items())[:EXAMINED]:
        row = rows.get((plain.key, name)) if plain is not None else None
        if row is None or row["status"] != "ok":
            continue
        facts["longest_text"] = max(facts["longest_text"], len(ids) + len(row["tokens"]))
        if draft is not None and report.vocabulary != "translated":
            found.append(Laws.along(decoder, ids, row["tokens"], cells[0].generation))
    if found:
        facts["laws"] = _law_facts(found)
    return facts


@dataclass(frozen=True)
class Laws:
    """Along one plain text, [n] each: acceptance expected at a position (1 - TV), whether both prefer the same token,
    and the entropies of p and q in nats."""

    acceptance: torch.Tensor
    agree: torch.Tensor
    entropy: torch.Tensor
    draft_entropy: torch.Tensor

    @staticmethod
    @torch.no_grad()
    def along(
        decoder: SpeculativeDecoder, ids: Sequence[int], tokens: Sequence[int], generation: Mapping[str, Any]
    ) -> Laws:
        """One pass of each model. Greedy text is looked at with the laws of temperature 1."""
        temperature = float(generation.get("temperature", 0.0)) or 1.0
        text = [*ids, *tokens][:-1]
        laws = []
        for runner in (decoder.target, decoder.draft):
            assert runner is not None
            fed = to_device([text], runner.device).clamp(max=runner.embedded - 1)
            scores = runner.model(input_ids=fed, use_cache=False).logits[0, len(ids) - 1 :]
            scores = pad_vocabulary(scores, decoder.target.vocab_size, runner.excluded)
            laws.append(torch.softmax(scores.float().cpu() / temperature, dim=-1))
        p, q = laws
        return Laws(
            torch.minimum(p, q).sum(-1),
            (p.argmax(-1) == q.argmax(-1)).float(),
            torch.special.entr(p).sum(-1),
            torch.special.entr(q).sum(-1),
        )


def _law_facts(found: Sequence[Laws]) -> dict[str, float]:
    """Means over all positions; acceptance in the third of least and of most entropy, and in the first and the last
    third of the texts."""
    acceptance, agree, entropy, draft_entropy = (
        torch.cat([getattr(laws, name) for laws in found])
        for name in ("acceptance", "agree", "entropy", "draft_entropy")
    )
    order = entropy.argsort()
    third = max(1, len(order) // 3)
    ends = [
        (laws.acceptance[: len(laws.acceptance) // 3], laws.acceptance[-(len(laws.acceptance) // 3) :])
        for laws in found
    ]
    long_enough = [(a, b) for a, b in ends if len(a)]
    early, late = (torch.cat([e[i] for e in long_enough]).mean() if long_enough else acceptance.mean() for i in (0, 1))
    made = {
        "expected_acceptance": acceptance.mean(), "agreement": agree.mean(), "entropy": entropy.mean(),
        "draft_entropy": draft_entropy.mean(), "acceptance_certain": acceptance[order[:third]].mean(),
        "acceptance_uncertain": acceptance[order[-third:]].mean(), "acceptance_early": early, "acceptance_late": late,
    }  # fmt: skip
    return {name: float(value) for name, value in made.items()}


def reasons(made: Mapping[str, Any]) -> list[str]:
    """Sentences that fit a candidate's figures; every one names the figure that it rests on."""
    facts, costs = made["facts"] or {}, made.get("costs") or {}
    laws, said = facts.get("laws") or {}, []
    if (ratio := facts.get("size_ratio") or 0) > LARGE_DRAFT:
        said.append(f"size: the draft has {ratio:.2f} of the target's parameters; above 1 : 3 it rarely pays")
    if laws and laws["agreement"] < LOW_AGREEMENT:
        said.append(f"agreement: both models prefer the same token at only {laws['agreement']:.0%} of the positions")
    if laws and laws["acceptance_certain"] - laws["acceptance_uncertain"] > ENTROPY_GAP:
        said.append(
            f"entropy: expected acceptance is {laws['acceptance_certain']:.2f} where the target is certain and "
            f"{laws['acceptance_uncertain']:.2f} where it is not (mean entropy {laws['entropy']:.2f} nats)"
        )
    if laws and laws["draft_entropy"] < OVERCONFIDENT * laws["entropy"]:
        said.append(
            f"entropy: the draft is overconfident, {laws['draft_entropy']:.2f} nats against the target's "
            f"{laws['entropy']:.2f}"
        )
    if laws and laws["acceptance_early"] - laws["acceptance_late"] > CONTEXT_DROP:
        said.append(
            f"context: expected acceptance falls from {laws['acceptance_early']:.2f} in the first third of the texts "
            f"to {laws['acceptance_late']:.2f} in the last"
        )
    return said + _setting_reasons(facts) + _cost_reasons(made, costs)


def _setting_reasons(facts: Mapping[str, Any]) -> list[str]:
    said = []
    if (facts.get("draft_context") or float("inf")) < facts.get("longest_text", 0):
        said.append(
            f"context: the draft's context of {facts['draft_context']} tokens ends inside the longest text of "
            f"{facts['longest_text']}"
        )
    if facts.get("same_template") is False:
        said.append("template: the two tokenizers have different chat templates, and the target's is used")
    if facts.get("vocabulary") == "translated":
        said.append("tokenizer: the vocabularies differ, the draft is translated through text")
    return said


def _cost_reasons(made: Mapping[str, Any], costs: Mapping[str, float]) -> list[str]:
    said: list[str] = []
    if not costs:
        return said
    if not costs["drafted_share"]:
        return ["coverage: no round had a draft"]
    length = round(costs["length"] / max(costs["drafted_share"], 1e-9))
    if made["best_length"] == 0:
        said.append(
            f"cost: at acceptance {costs['acceptance']:.2f} and cost ratio {costs['draft_cost']:.2f} no length pays"
        )
    elif made["best_length"] and length and made["best_length"] != length:
        said.append(
            f"length: theory advises {made['best_length']} drafted tokens, for a speed-up of "
            f"{made['best_length_speedup']:.2f}"
        )
    if costs["drafted_share"] < 0.5:
        said.append(f"coverage: only {costs['drafted_share']:.0%} of the rounds had a draft")
    measured, predicted = (made.get("decode_speedup") or {}).get("value"), made.get("predicted_speedup")
    if measured and predicted and measured < (1 - OUTSIDE) * predicted:
        said.append(
            f"overhead: measured {measured:.2f} against {predicted:.2f} predicted from the two models' times alone"
        )
    return said


__all__ = ["Laws", "compare", "compare_config", "examine", "reasons"]
