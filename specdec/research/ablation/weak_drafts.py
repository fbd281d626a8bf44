"""Which strategies of a setting contribute nothing: one row is too short to say so, all of them together may not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.drafters import make_drafters
from specdec.drafters.chain import chain_labels
from specdec.errors import SpecdecError
from specdec.research.ablation.store import Store
from specdec.research.ablation.table import labels
from specdec.stats import Counters, RoundRecord, Stats, contributes_nothing


def weak_drafts(manifest: Mapping[str, Any], store: Store) -> dict[str, list[str]]:
    """Name the strategies whose drafts were hardly ever accepted, by setting: the warning of a call, by the same bounds
    (`Stats.hardly_accepted`), from the rounds of all of the setting's rows, prompts and seeds pooled."""
    names = labels(manifest["cells"])
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for cell in manifest["cells"]:
        if cell["strategies"]:
            cells.setdefault(names[cell["key"]], []).append(cell)
    found = {}
    for setting, group in cells.items():
        asked = [
            (store.rows.get((cell["key"], p["id"])), p["fingerprint"]) for cell in group for p in manifest["prompts"]
        ]
        entries = [entry for entry, known in asked if entry is not None and entry["fingerprint"] == known]
        useless = pooled(entries).hardly_accepted()
        if useless:
            drafters = _drafters(group[0]["strategies"])
            found[setting] = [contributes_nothing(n, tally, drafters.get(n)) for n, tally in useless.items()]
    return found


def pooled(entries: Sequence[Mapping[str, Any]]) -> Stats:
    """The rounds of journal rows as those of one call, with the requests in which a strategy was skipped."""
    rows = [[RoundRecord(*record) for record in entry.get("records") or ()] for entry in entries]
    skipped: dict[str, float] = {r.strategy: 0.0 for row in rows for r in row if r.strategy is not None}
    for entry in entries:
        for name, count in (entry.get("skipped") or {}).items():  # older journals have none
            skipped[name] = skipped.get(name, 0.0) + count
    return Stats(rows=rows, counters={name: Counters(n_skipped=round(count)) for name, count in skipped.items()})


def _drafters(strategies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The strategies of a chain by label; none where one cannot be made, as a head of another machine."""
    try:
        drafters = make_drafters([dict(s) for s in strategies], has_draft=True)
    except SpecdecError:
        return {}
    return dict(zip(chain_labels(drafters), drafters, strict=True))
