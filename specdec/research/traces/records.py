"""A trace as rows of a results table: its passes as the statistics' rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec.decoding.result import Round
from specdec.files.texts import is_file
from specdec.research.ablation.table import SECONDS, Row, figures
from specdec.research.traces.rounds import nodes
from specdec.research.traces.trace import Trace
from specdec.stats import RoundRecord


def trace_rows(path: str | Path) -> list[Row] | None:
    """The rows of the trace at a path, with or without its suffix; None where there is none."""
    base = Path(path)
    base = base.with_suffix("") if base.suffix in (".json", ".safetensors") else base
    if not all(is_file(Path(f"{base}{suffix}")) for suffix in (".json", ".safetensors")):
        return None
    trace = Trace.load(base)
    settings = trace.provenance.get("settings") or {}
    models = trace.provenance.get("models") or {}
    named = {role: (models.get(role) or {}).get("name") for role in ("target", "draft")}
    rows = []
    for i, row in enumerate(trace.rows):
        entry = {"records": [list(r) for r in records_of(trace.of_row(i))], "tokens": row.output}
        rows.append(
            {
                **{"setting": "trace", "strategies": ", ".join(trace.strategies), "cell": "trace", "plain": None},
                **{"drafts": bool(trace.strategies), "status": "ok", "equals_plain": None, "pair": "trace"},
                **{"prompt": row.id or f"row {i}", "category": row.category, "seed": 0, "batch_size": 1, "call": 0},
                **{"acceptance": settings.get("acceptance"), "temperature": settings.get("temperature")},
                **dict.fromkeys(SECONDS),
                **named,
                **{"prompt_tokens": len(row.prompt), "finish_reason": row.finish_reason, **entry, **figures(entry)},
            }
        )
    return rows


def records_of(passes: Sequence[Round]) -> list[RoundRecord]:
    """The rounds of a row: a long draft that took several passes is one."""
    found: list[RoundRecord] = []
    begun: list[Round] = []
    for r in passes:
        begun.append(r)
        if not r.is_continued:
            found.append(_record(begun))
            begun = []
    return found + ([_record(begun)] if begun else [])


def _record(passes: Sequence[Round]) -> RoundRecord:
    last, accepted = passes[-1], sum(r.accepted for r in passes)
    own = len(last.tokens) > last.accepted
    drafted, levels, exhausted = sum(len(r.draft) for r in passes), None, False
    if last.parents is not None:
        levels = max((n.depth for n in nodes(last)), default=0)
        end = last.path[-1] if last.path else -1
        exhausted = end not in last.parents
    return RoundRecord(passes[0].strategy, drafted, accepted, levels, exhausted, own)
