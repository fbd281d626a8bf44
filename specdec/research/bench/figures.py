"""From the runs of a scenario to its figures.

A run is one call. Seconds of a call are the median over the repeats; a speed is all tokens over all seconds, and its
interval is the bootstrap's over calls. Where there is one call, a speed is the median over its repeats, and so is a
ratio of two, taken within each repeat: one disturbed repeat moves neither. A ratio of two speeds is paired in either
case: both are resampled with the same calls or repeats.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec import theory
from specdec.research import bootstrap
from specdec.research.bench.passes import PassCosts
from specdec.research.bootstrap import Interval

Run = Mapping[str, Any]
Runs = Sequence[Run]
Seconds = Callable[[Run], float]
WHOLE, DECODE = "tokens_per_second", "decode_tokens_per_second"


def whole(run: Run) -> float:
    """Seconds of a call."""
    return float(run["seconds"])


def decode(run: Run) -> float:
    """Seconds of a call's rounds: without the prefill of both models, which theory has no term for."""
    time = run["time"]
    return float(time["total"] - time["prefill"] - time["draft_prefill"])


SECONDS: dict[str, Seconds] = {WHOLE: whole, DECODE: decode}


def columns(runs: Runs, seconds: Seconds = whole) -> tuple[list[float], list[float]]:
    """(tokens, seconds), one entry a call: its median over the repeats."""
    groups = [[r for r in runs if r["call"] == call] for call in sorted({r["call"] for r in runs})]
    return [float(g[0]["tokens"]) for g in groups], [statistics.median(map(seconds, g)) for g in groups]


def speed(runs: Runs, seconds: Seconds = whole) -> Interval:
    """Tokens a second."""
    if len({r["call"] for r in runs}) == 1:
        return bootstrap.median([_speed(r, seconds) for r in runs])
    return bootstrap.ratio(*columns(runs, seconds))


def _speed(run: Run, seconds: Seconds) -> float:
    return run["tokens"] / seconds(run) if run["tokens"] and seconds(run) else math.nan


def speed_ratio(a: Runs, b: Runs, seconds: Seconds = whole) -> Interval:
    """Speed of a over speed of b, on the calls and repeats that both made."""
    mine, theirs = ({(r["call"], r["repeat"]): r for r in runs} for runs in (a, b))
    both = [key for key in mine if key in theirs]
    if not both:
        return Interval(None)
    a, b = [mine[key] for key in both], [theirs[key] for key in both]
    if len({call for call, _ in both}) == 1:
        return bootstrap.median([_speed(x, seconds) / _speed(y, seconds) for x, y in zip(a, b, strict=True)])
    return bootstrap.ratio_of_ratios(columns(a, seconds), columns(b, seconds))


def summary(runs: Runs) -> dict[str, Any]:
    """Speed, and what those who count their rounds counted."""
    made: dict[str, Any] = {"repeats": 1 + max(r["repeat"] for r in runs), WHOLE: speed(runs).to_dict()}
    made["tokens"] = sum(r["tokens"] for r in runs)
    if not all("rounds" in r for r in runs):
        return made
    drafted = total(runs, "drafted_rounds")
    made["tokens_per_round"] = total(runs, "generated_tokens") / max(1, total(runs, "rounds"))
    made["draft_length"] = total(runs, "draft_tokens") / drafted if drafted else 0.0
    made["acceptance_length"] = 1 + total(runs, "accepted_tokens") / drafted if drafted else 1.0
    proposed = total(runs, "draft_tokens")
    made["draft_acceptance_rate"] = total(runs, "accepted_tokens") / proposed if proposed else None
    if all("time" in r for r in runs):
        found = acceptance(runs)
        made["conditional_acceptance_rate"] = found["tested"]
        made |= {DECODE: speed(runs, decode).to_dict(), "acceptance": found, "ms_per_round": ms(runs)}
        made["ms_per_round_total"] = sum(made["ms_per_round"].values())
        made["host_reads_per_round"] = total(runs, "host_reads") / max(1, total(runs, "verify_passes"))
    return made


def total(runs: Runs, name: str) -> float:
    """Sum of a count over runs."""
    return float(sum(r[name] for r in runs))


def acceptance(runs: Runs) -> dict[str, Any]:
    """Accepted per tested token, pooled and by position; `survival`: accepted per drafted token, by position."""
    names = ("accepted", "tested", "drafted")
    accepted, tested, drafted = (_positions(runs, name) for name in names)
    return {
        "tested": sum(accepted) / sum(tested) if sum(tested) else None,
        "by_position": [a / t for a, t in zip(accepted, tested, strict=True) if t],
        "survival": [a / d for a, d in zip(accepted, drafted, strict=True) if d],
    }


def _positions(runs: Runs, name: str) -> list[int]:
    longest = max(len(r[name]) for r in runs)
    return [sum(r[name][i] for r in runs if i < len(r[name])) for i in range(longest)]


def ms(runs: Runs) -> dict[str, float]:
    """Mean milliseconds of a pass over all rows, by phase; `verify` with acceptance; no prefill."""
    passes = max(1.0, total(runs, "verify_passes"))
    times = {name: sum(r["time"][name] for r in runs) for name in ("draft", "verify", "other", "draft_prefill")}
    times["draft"] -= times.pop("draft_prefill")
    return {name: 1e3 * seconds / passes for name, seconds in times.items()}


def draft_pass_ms(runs: Runs) -> float:
    """Milliseconds of a draft pass in calls, what the strategy does around it included; 0 without any."""
    passes = total(runs, "draft_passes")
    return 1e3 * sum(r["time"]["draft"] - r["time"]["draft_prefill"] for r in runs) / passes if passes else 0.0


def prediction(runs: Runs, plain: Runs, costs: PassCosts) -> dict[str, Any]:
    """What theory makes of the measured acceptance and of the passes' costs, beside what was measured.

    predicted: from tokens of a pass over plain's, k draft passes in a round, and `v` for rounds with a draft.
    from_a: the closed formula with one `a` for all positions, where all drafts are of about one length.
    measured: decoding speed over plain's.
    outside: the share of decoding that is in neither model's passes, as they run alone and in a row.
    """
    passes, steps = max(1.0, total(runs, "verify_passes")), total(runs, "draft_passes")
    k, share = steps / passes, total(runs, "drafted_rounds") / max(1.0, total(runs, "rounds"))
    length = total(runs, "draft_tokens") / max(1.0, total(runs, "drafted_rounds"))
    gain = total(runs, "generated_tokens") / passes / (total(plain, "generated_tokens") / total(plain, "verify_passes"))
    predicted = costs.relative.speedup(gain, k, length, share)
    measured = speed_ratio(runs, plain, decode)
    within = passes * (costs.plain + share * (costs.verify - costs.plain)) + steps * costs.draft
    a = acceptance(runs)["tested"]
    return {
        **{"c": costs.c, "v": costs.v, "k": k},
        **{"plain_ms": costs.plain, "verify_ms": costs.verify, "draft_ms": costs.draft},
        "predicted": predicted,
        "from_a": theory.speedup(a, round(length), costs.c, costs.v) if a is not None and k else None,
        "measured": measured.to_dict(),
        "measured_to_predicted": measured.value / predicted if measured.value is not None else None,
        "outside": 1 - within / (1e3 * sum(map(decode, runs))),
    }
