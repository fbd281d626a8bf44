"""What the programs here that write documents share: by what a result was made, and speeds beside theory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.research.bench import report
from specdec.research.bench.tables import Table
from specdec.stats import PER_TESTED


def speeds_and_theory(result: Mapping[str, Any], scenario: str) -> Table:
    """Speeds and what theory makes of them in one table, as documents have it."""
    made, more = report.speeds(result, scenario), report.theory(result, scenario)
    more = more.without("plain pass ms", "verify ms", "draft ms", PER_TESTED, "measured")
    beside, blank = {row[0]: row[1:] for row in more.rows}, ["-"] * (len(more.heads) - 1)
    rows = [[*row, *beside.get(row[0], blank)] for row in made.rows]
    return made._replace(heads=[*made.heads, *more.heads[1:]], rows=rows) if more.rows else made


def made_with(result: Mapping[str, Any], by: str, **others: str) -> str:
    """By what, when, where and with which versions a result was made. others: versions of more packages."""
    machine, place = result.get("machine"), result.get("device", "")
    if machine is not None:
        place = f"{machine['gpu'] or machine['processor']}, {machine['threads']} threads"
    known = {"torch": None, "transformers": None, "specdec": None, **result["versions"], **others}
    used = [f"{name.replace('python', 'Python')} {version}" for name, version in known.items() if version]
    if result.get("commit"):
        used.append(f"commit {result['commit']}")
    when = f" on {result['date']}" if "date" in result else ""
    return f"Measured by `{by}`{when}{f': {place}' * bool(place)}; {', '.join(used)}."
