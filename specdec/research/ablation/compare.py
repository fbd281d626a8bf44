"""`specdec compare`: several drafts and strategies for one target on the same prompts, ranked, with reasons.

Built on the ablation runner: every candidate is a cell, plain decoding runs too, and the equality gate applies. One
teacher-forced pass of target and draft over the plain texts gives p and q at every position: agreement, entropy and
context explain what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.decoder import SpeculativeDecoder
from specdec.decoding.validation import check_places
from specdec.drafters import make_drafters
from specdec.errors import SpecdecError
from specdec.files.own_code import split_list
from specdec.research.ablation.config import PLAIN, AblationConfig, Cell
from specdec.research.ablation.merge import merge
from specdec.research.ablation.runner import Progress, run_ablation
from specdec.research.ablation.store import Store, read_checked
from specdec.research.ablation.summary import (
    ALONE,
    DRAFTED,
    by_setting,
    candidate_name,
    check_baseline,
    compare_settings,
    setting_figures,
    theoretical_speedup,
)
from specdec.research.ablation.table import Row, at, table_of
from specdec.research.loops import without_loops
from specdec.research.offline.forcing import read_pair
from specdec.stats import PER_TESTED

Candidate = tuple[str, str]  # the names of a pair and a chain
EXAMINED = 16  # prompts of the teacher-forced passes
LONGEST_K = 16
# Where a figure becomes a reason. Shares and differences of acceptance.
LARGE_DRAFT, LOW_AGREEMENT, ENTROPY_GAP, CONTEXT_DROP, OVERCONFIDENT, OUTSIDE = 1 / 3, 0.6, 0.2, 0.1, 0.67, 0.1


def compare_config(
    target: str,
    drafts: Sequence[str],
    strategies: Sequence[str] = (),
    k: int = 5,
    prompts: Sequence[Any] = (),
    data: Mapping[str, Any] | None = None,
    loading: Mapping[str, Any] | None = None,
    refused: dict[str, str] | None = None,
    **generation: Any,
) -> AblationConfig:
    """The ablation of a comparison: `draft-model` of `k` tokens with every draft, and chains as text, `a,b:key=value`,
    with every draft if they use one. A chain may have a rule of its own: `a@rule:key=value`.

    refused: takes the candidates that cannot run, with the reason, as long as one can; None = the first is raised.
    Raises SpecdecError for a comparison of nothing or of one thing with itself, and where no candidate can run.
    """
    if not drafts and not strategies:
        raise SpecdecError("compare: nothing to compare: give drafts or strategies")
    if len(set(drafts)) < len(drafts) or len(set(strategies)) < len(strategies):
        raise SpecdecError("compare: a draft or a strategy is named twice")
    names, shared = _names(drafts), dict(loading or {})
    pairs = {name: {**shared, "target": target, "draft": draft} for name, draft in zip(names, drafts, strict=True)}
    pairs[ALONE] = {"target": target, **{k: v for k, v in shared.items() if not k.startswith("draft_")}}
    wanted = [(name, DRAFTED) for name in names]
    wanted += [(pair, text) for text in strategies for pair in (names if names and _uses_draft(text) else [ALONE])]
    options: dict[str, Any] = {"data": dict(data or {}), "prompts": tuple(prompts) or None, "generation": generation}

    def config(chosen: Sequence[Candidate]) -> AblationConfig:
        named, chains = {pair: pairs[pair] for pair, _ in chosen}, {chain: _chain(chain, k) for _, chain in chosen}
        cells = tuple({"pair": pair, "strategies": chain, **_rule(chain)} for pair, chain in chosen)
        return AblationConfig(named, chains, axes={"strategies": [PLAIN]}, cells=cells, **options)

    return config(_runnable(wanted, config, refused))


def _runnable(
    wanted: Sequence[Candidate], config: Callable[[Sequence[Candidate]], AblationConfig], refused: dict[str, str] | None
) -> list[Candidate]:
    """The candidates that can run, each tried by itself; the others go into `refused`, or raise."""
    found, errors = [], {}
    for one in wanted:
        try:
            check_places(config([one]).pairs[one[0]])
            found.append(one)
        except SpecdecError as error:
            errors[candidate_name(*one)] = error
    if errors and (refused is None or not found):
        raise next(iter(errors.values()))
    if refused is not None:
        refused.update({name: str(error) for name, error in errors.items()})
    return found


def _chain(text: str, k: int) -> list[Any]:
    """The strategies of a chain as text, without its acceptance rule."""
    if text == DRAFTED:
        return [{"name": "draft-model", "n_max": k}]
    found = split_list(text.rpartition("@")[0] or text)
    if found in ([], ["none"]):
        raise SpecdecError(f"compare: the strategy {text!r} drafts nothing; plain decoding runs beside the others")
    return found


def _rule(text: str) -> dict[str, str]:
    """The acceptance rule behind a chain, if it has one."""
    chain, _, rule = text.rpartition("@")
    return {"acceptance": rule.strip()} if chain else {}


def _uses_draft(text: str) -> bool:
    try:
        return any(d.uses_draft_model for d in make_drafters(_chain(text, 1), has_draft=True))
    except SpecdecError:  # it is refused by name
        return False


def _names(drafts: Sequence[str]) -> list[str]:
    """The last part of each draft's name where that tells them apart."""
    short = [Path(draft).name for draft in drafts]
    return short if len(set(short)) == len(short) else list(drafts)


def compare(
    config: AblationConfig,
    out: Path,
    progress: Progress = lambda what: None,
    baseline: str | None = None,
    drop_loops: bool = False,
    refused: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run what is missing in `out`, and rank.

    baseline: a candidate that the others are compared with.
    drop_loops: leave looped texts out of the figures.
    refused: candidates that `compare_config` refused, with the reasons.
    Returns plain data: `candidates` from the fastest to the slowest; `refused`, also those of which every row failed;
    `prompts`, `gate`, `errors`, `comparisons`. Raises SpecdecError for an unknown baseline.
    """
    check_baseline(baseline, [candidate_name(cell["pair"], cell["strategies"]) for cell in config.cells])
    run_ablation(config, out, progress=progress, examine=examine)
    summary = merge(out, drop_loops=drop_loops)
    assert summary is not None  # one process ran all rows
    manifest, store = read_checked(out), Store(out).read()
    facts = {cell["pair"]: store.facts.get(cell["key"]) for cell in reversed(manifest["cells"])}
    rows = table_of(manifest, store)[0]
    rows = without_loops(rows) if drop_loops else rows
    refused, groups = dict(refused or {}), []
    for group in by_setting(rows).values():
        failed = all(row["status"] == "error" for row in group)
        if group[0]["drafts"] and failed:
            refused[candidate_name(group[0]["pair"], group[0]["strategies"])] = str(group[0]["error"])
        elif group[0]["drafts"]:
            groups.append(group)
    made = [candidate(group, rows, facts.get(group[0]["pair"])) for group in groups]
    for entry, group in zip(made, groups, strict=True):
        entry["reasons"] += summary["warnings"].get(group[0]["setting"], [])
    named = {c["name"]: group for c, group in zip(made, groups, strict=True)}
    others = [name for name in named if baseline in named and name != baseline]
    compared = [compare_settings(name, named[name], baseline, named[baseline]) for name in others] if baseline else []
    made.sort(key=lambda c: -((c["speedup"] or {}).get("value") or 0.0))
    kept = ("date", "commit", "versions", "machine", "models", "gate", "errors", "dropped_loops")
    categories = list(dict.fromkeys(prompt["category"] for prompt in manifest["prompts"]))
    asked = {"dataset": config.data.dataset, "count": len(manifest["prompts"]), "categories": categories}
    head = {name: summary[name] for name in kept} | {"prompts": asked, "refused": refused}
    return {**head, "candidates": made, **({"comparisons": compared} if baseline is not None else {})}


def candidate(group: Sequence[Row], rows: Sequence[Row], facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """One draft or strategy: its figures, what theory makes of them, and the reasons that fit."""
    figures, head = setting_figures(group, rows), group[0]
    costs, alone = figures.get("costs"), head["pair"] == ALONE
    depth = max((len(r["tested"]) for r in group), default=0)
    counts = [[sum(at(r[name], i) for r in group) for name in ("reached", "tested")] for i in range(depth)]
    by_position = [a / t if t else None for a, t in counts]
    categories = dict.fromkeys(r["category"] for r in group)
    by_category = {c: _pooled([r for r in group if r["category"] == c]) for c in categories}
    # What a strategy without a model drafts is decided by the text: it has no length to choose.
    best, gain = best_length(None if alone else costs)
    made = {
        "name": candidate_name(head["pair"], head["strategies"]),
        "pair": head["pair"],
        **figures,
        "conditional_acceptance_rate_per_position": by_position,
        "conditional_acceptance_rate_per_category": by_category,
        **{"acceptance_by_position": by_position, "acceptance_by_category": by_category},  # the old names
        "cost_ratio": costs["draft_cost"] if costs else None,
        "best_length": best,
        "best_length_speedup": gain,
        "facts": None if alone else facts,
    }
    return {**made, "reasons": reasons(made)}


def best_length(costs: Mapping[str, float] | None) -> tuple[int | None, float | None]:
    """The draft length that theory advises and the speed-up that it predicts there; 0 = do not draft, None = no draft
    was ever made."""
    if costs is None or not costs["drafted_share"]:
        return None, None
    gains = {0: 1.0, **{k: theoretical_speedup(costs, k) for k in range(1, LONGEST_K + 1)}}
    best = max(gains, key=lambda k: (gains[k], -k))
    return best, gains[best]


def _pooled(rows: Sequence[Row]) -> float | None:
    tested = sum(r["tested_tokens"] for r in rows)
    return sum(r["accepted_tokens"] for r in rows) / tested if tested else None


# -- what explains it -------------------------------------------------------------------------------------------------


def examine(
    decoder: SpeculativeDecoder,
    cells: Sequence[Cell],
    encoded: Mapping[str, Any],
    rows: Mapping[tuple[str, str], Mapping[str, Any]],
) -> dict[str, Any]:
    """Facts about a pair: sizes, vocabularies, templates, and p and q along the plain texts."""
    report, draft = decoder.report, decoder.draft
    templates = [getattr(t, "chat_template", None) for t in (decoder.tokenizer, decoder.draft_tokenizer)]
    plain = next((cell for cell in cells if not cell.strategies), None)
    texts = []
    for name, ids in list(encoded.items())[:EXAMINED]:
        row = rows.get((plain.key, name)) if plain is not None else None
        if row is not None and row["status"] == "ok":
            texts.append((ids, row["tokens"]))
    found: list[Tensor] = []
    if draft is not None and report.vocabulary != "translated":
        limit = min(decoder.target.context, draft.context)
        inside = [(ids, tokens[: limit - len(ids)]) for ids, tokens in texts if len(ids) < limit and tokens]
        found = along(decoder, inside, cells[0].generation)
    return {
        "size_ratio": report.size_ratio,
        "vocabulary": report.vocabulary,
        "same_template": templates[0] == templates[1],
        "context": decoder.target.context,
        "draft_context": draft.context if draft is not None else None,
        "longest_text": max((len(ids) + len(tokens) for ids, tokens in texts), default=0),
        "distributions": _means(found) if found else None,
    }


@torch.no_grad()
def along(
    decoder: SpeculativeDecoder, texts: Sequence[tuple[list[int], list[int]]], generation: Mapping[str, Any]
) -> list[Tensor]:
    """What p and q are along each (prompt, output), [4, n]: expected acceptance (1 - TV), agreement of their best
    tokens, entropy of p and of q in nats. For greedy texts, p and q at temperature 1."""
    options = {k: v for k, v in generation.items() if k not in ("seed", "batch_size")}
    call = decoder._call([ids for ids, _ in texts], [], **options)
    found = []
    for scores in read_pair(decoder, call, [tokens for _, tokens in texts]):
        p, q = (torch.softmax(s.float(), dim=-1) for s in scores)
        agree = (p.argmax(-1) == q.argmax(-1)).float()
        entropies = [torch.special.entr(x).sum(-1) for x in (p, q)]
        found.append(torch.stack([torch.minimum(p, q).sum(-1), agree, *entropies]))
    return found


def _means(found: Sequence[Tensor]) -> dict[str, float]:
    """Means over all positions; of expected acceptance also over the third of the positions with the least and the most
    entropy, and over the first and the last third of each text."""
    acceptance, agree, entropy, draft_entropy = torch.cat(list(found), dim=1)
    order = entropy.argsort()
    third = max(1, len(order) // 3)
    thirds = [(text[0], text.shape[1] // 3) for text in found if text.shape[1] >= 3] or [(acceptance, len(acceptance))]
    made = {
        "expected_acceptance": acceptance,
        "agreement": agree,
        "entropy": entropy,
        "draft_entropy": draft_entropy,
        "acceptance_certain": acceptance[order[:third]],
        "acceptance_uncertain": acceptance[order[-third:]],
        "acceptance_early": torch.cat([a[:n] for a, n in thirds]),
        "acceptance_late": torch.cat([a[-n:] for a, n in thirds]),
    }
    return {name: float(values.mean()) for name, values in made.items()}


def reasons(made: Mapping[str, Any]) -> list[str]:
    """Sentences that fit a candidate's figures; every one names the figure that it rests on."""
    facts, costs = made["facts"] or {}, made.get("costs")
    said = [*_pair_reasons(facts), *_distribution_reasons(facts.get("distributions"))]
    return said if costs is None else [*said, *_cost_reasons(made, costs)]


def _pair_reasons(facts: Mapping[str, Any]) -> Iterator[str]:
    if (ratio := facts.get("size_ratio") or 0) > LARGE_DRAFT:
        yield f"size: the draft has {ratio:.2f} of the target's parameters; above 1 : 3 it rarely pays"
    own, longest = facts.get("draft_context") or math.inf, facts.get("longest_text", 0)
    if own < longest:
        yield f"context: the draft's context of {own} tokens ends inside the longest text of {longest}"
    if facts.get("same_template") is False:
        yield "template: the two tokenizers have different chat templates, and the target's is used"
    if facts.get("vocabulary") == "translated":
        yield "tokenizer: the vocabularies differ, the draft is translated through text"


def _distribution_reasons(d: Mapping[str, float] | None) -> Iterator[str]:
    if d is None:
        return
    if d["agreement"] < LOW_AGREEMENT:
        yield f"agreement: both models prefer the same token at only {d['agreement']:.0%} of the positions"
    certain, uncertain = d["acceptance_certain"], d["acceptance_uncertain"]
    if certain - uncertain > ENTROPY_GAP:
        yield (
            f"entropy: expected acceptance is {certain:.2f} where the target is certain and {uncertain:.2f} where it "
            f"is not (mean entropy {d['entropy']:.2f} nats)"
        )
    if d["draft_entropy"] < OVERCONFIDENT * d["entropy"]:
        both = f"{d['draft_entropy']:.2f} nats against the target's {d['entropy']:.2f}"
        yield f"entropy: the draft is overconfident, {both}"
    early, late = d["acceptance_early"], d["acceptance_late"]
    if early - late > CONTEXT_DROP:
        yield (
            f"context: expected acceptance falls from {early:.2f} in the first third of the texts to {late:.2f} in the "
            "last"
        )


def _cost_reasons(made: Mapping[str, Any], costs: Mapping[str, float]) -> Iterator[str]:
    if not costs["drafted_share"]:
        yield "coverage: no round had a draft"
        return
    length, best = round(costs["length"] / costs["drafted_share"]), made["best_length"]
    if best == 0:
        yield f"cost: at {PER_TESTED} {costs['acceptance']:.2f} and cost ratio {costs['draft_cost']:.2f} no length pays"
    elif best and length and best != length:
        gain = made["best_length_speedup"]
        yield f"length: theory advises {best} drafted tokens, for a speed-up of {gain:.2f}"
    if costs["drafted_share"] < 0.5:
        yield f"coverage: only {costs['drafted_share']:.0%} of the rounds had a draft"
    measured, predicted = (made.get("decode_speedup") or {}).get("value"), made.get("predicted_speedup")
    if measured and predicted and measured < (1 - OUTSIDE) * predicted:
        both = f"measured {measured:.2f} against {predicted:.2f}"
        yield f"overhead: {both} predicted from the two models' times alone"
