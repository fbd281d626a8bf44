"""What an ablation found: figures of every setting with intervals, paired comparisons, and whether texts held.

A setting is a cell without its seed. Speed-ups are paired with plain decoding of the same prompts and seeds; `speedup`
is of whole calls, `decode_speedup` without their prefill, which is what theory predicts. The comparison of settings is
paired as well, against a baseline: the first setting of the same pair and sampling that drafts, or a named one with
their own sampling.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec import theory
from specdec.errors import unknown_name
from specdec.research.ablation.axes import GENERATION, LOADING, SHORTHANDS
from specdec.research.ablation.table import REFERENCE, Row
from specdec.research.bootstrap import Interval, difference, least_p, ratio, ratio_of_ratios, swap_test
from specdec.research.loops import is_looped, without_loops
from specdec.stats import with_old_names

FIGURES = {
    "tokens_per_round": ("generated_tokens", "rounds"),
    "draft_acceptance_rate": ("accepted_tokens", "draft_tokens"),
    "conditional_acceptance_rate": ("accepted_tokens", "tested_tokens"),
    "tokens_per_second": ("emitted_tokens", "seconds"),
    "loop_share": ("loop_tokens", "emitted_tokens"),
    "distance": ("distance", "emitted_tokens"),
}
OF_ROWS = ("tokens_per_second", "loop_share", "distance")  # which no part of a row has
COMPARED = ("tokens_per_round", "conditional_acceptance_rate", "tokens_per_second")  # of two settings
# Options of a call that leave the distribution of texts as it is, or that rows of one comparison may differ in.
_OTHERS = (
    "acceptance", "seed", "exact", "batch_size", "keep_state", "verify_width", "order", "draft_length", "length_policy",
    "costs", "output_logprobs", "shard",
)  # fmt: skip
SAMPLING = ("target", "target_revision", *(name for name in GENERATION if name not in _OTHERS))
ASKED = ("pair", "strategies", *SHORTHANDS, *LOADING, *GENERATION)
Clusters = dict[Any, Row]
ALONE = "no draft"  # the pair of a comparison's strategies that need no draft model
DRAFTED = "draft-model"  # the chain of every draft of a comparison
SUMMED = (
    "generated_tokens", "rounds", "accepted_tokens", "tested_tokens", "draft_tokens", "drafted_rounds",
    "emitted_tokens", "seconds", "draft_seconds", "verify_seconds", "prefill_seconds", "loop_tokens",
    "distance",
)  # fmt: skip


def summarise(rows: Sequence[Row], baseline: str | None = None, drop_loops: bool = False) -> dict[str, Any]:
    """Plain data for JSON: `settings` in the order of the grid, `categories`, `comparisons`, `gate`, `errors`.

    baseline: the setting that the others are compared with, each with the one that has its temperature and other
        sampling (`counterpart`); None = the first one of their pair and sampling that drafts. Raises SpecdecError for
        one that is not there.
    drop_loops: leave looped texts out of all figures; the gate and the errors are of all rows.
    """
    kept = without_loops(rows) if drop_loops else rows
    groups = by_setting(kept)
    baseline = None if baseline is None else find_setting(baseline, groups)
    checked = {"rows": len(rows), "baseline": baseline, "errors": _errors(rows), "gate": gate(rows)}
    return {
        **checked,
        "context_rows": sum(row.get("finish_reason") == "context" for row in rows),
        "dropped_loops": len(rows) - len(kept) if drop_loops else None,
        "settings": {name: setting_figures(group, kept) for name, group in groups.items()},
        "categories": {name: _categories(group) for name, group in groups.items()},
        "comparisons": _comparisons(groups, baseline),
    }


def by_setting(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by setting, in the order of the table."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["setting"]].append(row)
    return dict(groups)


def gate(rows: Sequence[Row]) -> dict[str, Any]:
    """The equality gate: rows compared with plain decoding, and those that differ.

    lossy: settings whose rule changes the distribution.
    """
    compared = [r for r in rows if r["equals_plain"] is not None]
    names = ("setting", "seed", "prompt", "first_difference")
    differing = [{name: r[name] for name in names} for r in compared if not r["equals_plain"]]
    lossy = list(dict.fromkeys(r["setting"] for r in rows if r["lossy"]))
    return {"compared": len(compared), "differing": differing, "passed": not differing, "lossy": lossy}


def setting_figures(group: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of one setting, its failed rows left out; `rows` has those of its reference."""
    sound = [r for r in group if r["status"] == "ok"]
    compared = [r["equals_plain"] for r in sound if r["equals_plain"] is not None]
    straight = [r for r in sound if not is_looped(r)]
    made: dict[str, Any] = {
        "drafts": group[0]["drafts"],
        "pair": group[0]["pair"],
        "lossy": any(r.get("lossy") for r in sound),
        "rows": len(group),
        "prompts": len({conversation(r) for r in group}),
        "errors": len(group) - len(sound),
        "compared": len(compared),
        "differing": compared.count(False),
        "looped_rows": len(sound) - len(straight),
        **_ratios(sound),
    }
    if len(straight) < len(sound):
        made["without_loops"] = _ratios(straight)
    return made | _against_plain(sound, rows) if group[0]["drafts"] else made


def _ratios(sound: Sequence[Row]) -> dict[str, Any]:
    """The FIGURES of some rows with their intervals, None without rows."""
    clusters = list(clustered(sound).values())
    if not clusters:
        return with_old_names(dict.fromkeys(FIGURES))
    columns = {name: [c[name] for c in clusters] for name in SUMMED}
    made = {name: ratio(columns[x], columns[y]) for name, (x, y) in FIGURES.items()}
    if any(r.get("lossy") and r.get("distance") is None for r in sound):  # of an older table
        made["distance"] = Interval(None)
    return with_old_names({name: value.to_dict() for name, value in made.items()})


def _against_plain(sound: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any]:
    mine, plain = paired(sound, references(sound, rows))
    if not mine:
        return dict.fromkeys(("speedup", "decode_speedup", "speedup_p", "predicted_speedup"))
    tokens = [[c["emitted_tokens"] for c in side] for side in (mine, plain)]
    seconds = [[c["seconds"] for c in side] for side in (mine, plain)]
    decoding = [[c["seconds"] - c["prefill_seconds"] for c in side] for side in (mine, plain)]
    whole, decode = (tuple(zip(tokens, below, strict=True)) for below in (seconds, decoding))
    costs = measured_costs(mine, plain)
    return {
        "speedup": ratio_of_ratios(*whole).to_dict(),
        "decode_speedup": ratio_of_ratios(*decode).to_dict(),
        "speedup_p": swap_test(whole[0], whole[1]),
        "costs": costs,
        "predicted_speedup": predicted_speedup(costs),
    }


def references(sound: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The plain rows that belong to these; of those that are not among `rows`, what these rows know of them."""
    wanted = {(r["plain"], r["prompt"]): r for r in sound}
    found = [r for r in rows if not r["drafts"] and r["status"] == "ok" and (r["cell"], r["prompt"]) in wanted]
    for key in wanted.keys() - {(r["cell"], r["prompt"]) for r in found}:
        own = wanted[key]
        if own.get("plain_seconds") is not None:
            head = {name: own[name] for name in ("prompt", "seed", "batch_size", "call")}
            counts = {name: own[f"plain_{name}"] for name in REFERENCE}
            found.append({**dict.fromkeys(SUMMED, 0), **head, **counts, "cell": key[0], "drafts": False})
    return found


def conversation(row: Row) -> str:
    """The id of the prompt that a row is from, or of its first turn: turns of one conversation are no two samples."""
    return row.get("conversation") or str(row["prompt"])


def clustered(rows: Sequence[Row], by_call: bool = True) -> Clusters:
    """Sums by cluster: a prompt with all its seeds and turns; where several share a call, the call with all of them."""
    sums: Clusters = {}
    by_call = by_call and len({conversation(row) for row in rows}) > 1  # else no interval
    for row in rows:
        key = row["call"] if by_call and row["batch_size"] > 1 else conversation(row)
        into = sums.setdefault(key, dict.fromkeys(SUMMED, 0.0))
        for name in SUMMED:
            into[name] += row.get(name) or 0
    return sums


def paired(a: Sequence[Row], b: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Clusters of two settings in the same order, made of the prompts and seeds that both have."""
    keys = [{(r["prompt"], r["seed"]) for r in side} for side in (a, b)]
    both = keys[0] & keys[1]
    alike = len({r["batch_size"] for r in (*a, *b)}) == 1  # else the calls of the two have different prompts
    mine, other = (clustered([r for r in side if (r["prompt"], r["seed"]) in both], alike) for side in (a, b))
    shared = [key for key in mine if key in other]
    return [mine[key] for key in shared], [other[key] for key in shared]


def measured_costs(mine: Sequence[Row], plain: Sequence[Row]) -> dict[str, float] | None:
    """What theory asks for, measured; None without rounds of both.

    acceptance: accepted / tested tokens, the `a` of specdec.theory.
    length: mean drafted tokens of a round.
    drafted_share: share of the rounds that have a draft.
    draft_cost c: of a drafted token, in plain passes.
    width_cost v: extra cost of the wide pass, in plain passes.
    """
    total, reference = ({n: sum(c.get(n, 0.0) for c in side) for n in SUMMED} for side in (mine, plain))
    if not total["rounds"] or not reference["rounds"] or not reference["verify_seconds"]:
        return None
    per_pass = reference["verify_seconds"] / reference["rounds"]
    drafted = total["draft_tokens"]
    return {
        "acceptance": total["accepted_tokens"] / total["tested_tokens"] if total["tested_tokens"] else 0.0,
        "length": drafted / total["rounds"],
        "drafted_share": total["drafted_rounds"] / total["rounds"],
        "tokens_per_round": total["generated_tokens"] / total["rounds"],
        "draft_cost": total["draft_seconds"] / drafted / per_pass if drafted else 0.0,
        "width_cost": total["verify_seconds"] / total["rounds"] / per_pass - 1,
        "plain_pass_seconds": per_pass,
    }


def predicted_speedup(costs: Mapping[str, float] | None) -> float | None:
    """Speed-up that theory gives for the measured tokens a round and costs: what is left to the measured one is time
    outside the two models."""
    if costs is None:
        return None
    return costs["tokens_per_round"] / (1 + costs["length"] * costs["draft_cost"] + costs["width_cost"])


def theoretical_speedup(costs: Mapping[str, float], k: int) -> float:
    """Speed-up at another draft length, from one acceptance for all positions, the share of rounds with a draft, and
    costs that grow with k. A negative width cost is noise, which must not grow."""
    if not costs["length"]:
        return 1.0
    per_token = costs["draft_cost"] + max(0.0, costs["width_cost"]) / costs["length"]
    gain = costs["drafted_share"] * float(theory.accepted_per_round(costs["acceptance"], k))
    return (1 + gain) / (1 + costs["drafted_share"] * k * per_token)


def check_baseline(baseline: str | None, settings: Iterable[str]) -> None:
    """Raise SpecdecError for a baseline that is no setting."""
    known = list(settings)
    if baseline is not None and baseline not in known:
        raise unknown_name("setting", baseline, known)


def candidate_name(pair: str, chain: str) -> str:
    """What a comparison calls a candidate: its draft, its chain, or both."""
    return chain if pair == ALONE else pair if chain == DRAFTED else f"{pair} {chain}"


def find_setting(name: str, groups: Mapping[str, Sequence[Row]]) -> str:
    """The setting of this name, or the only one that `specdec compare` calls so. Raises SpecdecError without one.

    groups: rows by setting, of which the first one's pair and chain count.
    """
    heads = {setting: rows[0] for setting, rows in groups.items() if rows[0]["drafts"]}
    named = [
        s for s, head in heads.items() if candidate_name(str(head.get("pair")), str(head.get("strategies"))) == name
    ]
    if name not in groups and len(named) == 1:
        return named[0]
    check_baseline(name, groups)
    return name


def counterpart(row: Row, baseline: str, groups: Mapping[str, Sequence[Row]]) -> str | None:
    """The setting that is the baseline with this row's target, temperature and other sampling; None if there is none.
    Texts of other distributions are no pairs."""
    wanted = _sampling(row), _place(groups[baseline][0])
    found = [name for name, (head, *_) in groups.items() if (_sampling(head), _place(head)) == wanted]
    return baseline if baseline in found else next(iter(found), None)


def _sampling(row: Row) -> frozenset[tuple[str, str]]:
    """What decides the distribution of a row's text, prompt apart."""
    return frozenset((name, repr(value)) for name, value in row.items() if name in SAMPLING)


def _place(row: Row) -> frozenset[tuple[str, str]]:
    """What else was asked for: pair, chain, its parameters, loading and other options."""
    asked = (name for name in row if (name in ASKED or "." in name) and name not in (*SAMPLING, "seed"))
    return frozenset((name, repr(row[name])) for name in asked)


def _comparisons(groups: Mapping[str, Sequence[Row]], baseline: str | None) -> list[dict[str, Any]]:
    """Every drafting setting against the baseline of its sampling, on the same prompts and seeds."""
    first: dict[Any, str] = {}
    base: str | None
    made = []
    for name, group in groups.items():
        if not group[0]["drafts"]:
            continue
        if baseline is None:
            base = first.setdefault((group[0]["pair"], _sampling(group[0])), name)
        else:
            base = counterpart(group[0], baseline, groups)
        if base not in (None, name):
            made.append(compare_settings(name, group, base, groups[base]))
    return made


def compare_settings(name: str, a: Sequence[Row], other: str, b: Sequence[Row]) -> dict[str, Any]:
    """Paired differences of two settings. p-values are of the same pooled differences, by swapping the settings in some
    clusters; they are not corrected for the number of comparisons."""
    mine, theirs = paired(*([r for r in side if r["status"] == "ok"] for side in (a, b)))
    made: dict[str, Any] = {"setting": name, "against": other, "clusters": len(mine), "least_p": least_p(len(mine))}
    for figure in COMPARED:
        top, bottom = FIGURES[figure]
        x, y, z, w = ([c[n] for c in side] for side in (mine, theirs) for n in (top, bottom))
        found = difference((x, y), (z, w)) if mine else Interval(None)
        counted = sum(bool(b or d) for b, d in zip(y, w, strict=True))
        p = swap_test((x, y), (z, w)) if mine else None
        made[figure] = {**found.to_dict(), "p": p, "least_p": least_p(counted)}
    return with_old_names(made)


def _categories(group: Sequence[Row]) -> dict[str, Any]:
    names = dict.fromkeys(r["category"] for r in group)
    sound = {c: [r for r in group if r["category"] == c and r["status"] == "ok"] for c in names}
    return {c: {"prompts": len({conversation(r) for r in rows}), **_ratios(rows)} for c, rows in sound.items()}


def _errors(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Errors with the number of rows that met them, by setting."""
    counts = Counter((row["setting"], row["error"]) for row in rows if row["status"] != "ok")
    return [{"setting": s, "error": e, "rows": n} for (s, e), n in counts.items()]
