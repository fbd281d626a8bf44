"""The table of an ablation: one row per prompt and cell, in the order of the grid, with the equality gate's verdict.

A function of the folder alone: run.json says which rows belong to it and in which order, the journals hold them. So
the table of a run that was killed and resumed is the table of one that was not, apart from `TIMES`.

docs/ablation.md has all columns. Those of the gate:

- `equals_plain`: whether the token ids are the reference's; None where they need not be (`leviathan` with sampling
  keeps the distribution and not the sample), and where there is no reference or a row failed;
- `first_difference`: index of the first id that differs.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError, need
from specdec.files.texts import as_path, is_file, is_folder, parse_json, write_file
from specdec.research.ablation.config import PLAIN
from specdec.research.ablation.store import Store, read_checked
from specdec.research.exactness.equality import first_difference
from specdec.research.loops import loop_tokens
from specdec.stats import Positions, RoundRecord, Tally

TABLE = "table.parquet"
SECONDS = ("seconds", "prefill_seconds", "draft_seconds", "verify_seconds", "other_seconds")
TIMES = (
    *SECONDS, "tokens_per_second", "strategy_seconds", *(f"plain_{name}" for name in SECONDS if name[0] in "spv")
)  # fmt: skip
COUNTED = (
    "rounds", "drafted_rounds", "draft_tokens", "tested_tokens", "accepted_tokens", "generated_tokens",
    "tokens_per_round", "acceptance_length", "draft_acceptance_rate", "conditional_acceptance_rate",
    "acceptance_histogram",
)  # fmt: skip
AS_THEY_ARE = (
    "prompt_tokens", "prompt_hash", "chat_template", "row_seed", "finish_reason", "exact", "lossy", "versions",
    "tokens", "text", "records",
)  # fmt: skip
# Kept in each row from its reference.
REFERENCE = ("rounds", "generated_tokens", "emitted_tokens", "seconds", "prefill_seconds", "verify_seconds")
Row = dict[str, Any]


def build_table(folder: Path) -> tuple[list[Row], int]:
    """The rows of a folder, and how many are missing. Raises SpecdecError for another folder than an ablation's."""
    return table_of(read_checked(folder), Store(folder).read())


def table_of(manifest: Mapping[str, Any], store: Store) -> tuple[list[Row], int]:
    """The rows that the description asks for, and how many of them are missing."""
    names = labels(manifest["cells"])
    rows, missing = [], 0
    for cell in manifest["cells"]:
        for prompt in manifest["prompts"]:
            entry = store.rows.get((cell["key"], prompt["id"]))
            if entry is None or entry["fingerprint"] != prompt["fingerprint"]:
                missing += 1
                continue
            rows.append({**_flat(entry, cell, prompt, names[cell["key"]]), **models_of(cell, manifest)})
    _gate(rows)
    with_references(rows)
    return rows, missing


def labels(cells: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A setting in words, by cell: what differs between the cells, the seed left out."""
    columns = {c["key"]: _settings(c) for c in cells}
    axes = [n for n in dict.fromkeys(n for v in columns.values() for n in v) if n not in ("seed", "strategies")]
    seen = {name: {repr(v.get(name)) for v in columns.values()} for name in axes}
    seen["acceptance"].discard("None")  # of the references, which accept nothing
    varying = [name for name, values in seen.items() if len(values) > 1]
    last = {name: name.rpartition(".")[2] for name in varying}  # a parameter without its strategy, if that says which
    short = {name: part if list(last.values()).count(part) == 1 else name for name, part in last.items()}
    short["temperature"] = "T"
    found = {}
    for key, values in columns.items():
        parts = [str(values["pair"])] if "pair" in varying else []
        parts.append(str(values["strategies"]))
        for name in varying:
            if name != "pair" and values.get(name) is not None:
                value = values[name]
                text = f"{value:g}" if isinstance(value, float) else str(value)
                parts.append(text if name == "acceptance" else f"{short[name]}={text}")
        found[key] = " ".join(parts)
    return found


def _settings(cell: Mapping[str, Any]) -> Row:
    """The columns of a cell: the usual ones and the axes."""
    generation, plain = cell["generation"], cell["chain"] == PLAIN
    usual = {
        "pair": cell["pair"],
        "strategies": cell["chain"],
        "acceptance": None if plain else generation["acceptance"],
        "temperature": float(generation.get("temperature", 0.0)),
        "seed": cell["seed"],
        "batch_size": cell["batch_size"],
    }
    return {**usual, **{k: v for k, v in cell["settings"].items() if k not in usual}}


def models_of(cell: Mapping[str, Any], manifest: Mapping[str, Any]) -> Row:
    """The models of a cell: their names, and as revisions the hub's commits, or what was asked for."""
    asked = cell["models"] if isinstance(cell.get("models"), Mapping) else {}
    loaded, made = manifest.get("models", {}).get(cell["pair"], []), Row()
    for role, option in (("target", "revision"), ("draft", "draft_revision")):
        name, revision = asked.get(role), asked.get(option)
        known = [models.get(role, {}) for models in loaded]
        commits = [
            m["commit"] for m in known if (m.get("name"), m.get("revision")) == (name, revision) and m.get("commit")
        ]
        made |= {role: name, f"{role}_revision": (commits or [revision])[0]}
    return made


def _flat(entry: Mapping[str, Any], cell: Mapping[str, Any], prompt: Mapping[str, Any], label: str) -> Row:
    seconds = entry.get("seconds")
    return {
        "setting": label,
        **_settings(cell),
        "cell": cell["key"],
        "plain": cell["plain"],
        "prompt": prompt["id"],
        "category": prompt["category"],
        "turn": prompt.get("turn", 1),
        "conversation": prompt.get("conversation", prompt["id"]),
        "call": entry["call"],
        "comparable": cell["comparable"],
        "drafts": bool(cell["strategies"]),
        "status": entry["status"],
        "error": entry["error"],
        **{name: entry.get(name) for name in (*AS_THEY_ARE, *SECONDS)},
        **figures(entry),
        "tokens_per_second": len(entry["tokens"]) / seconds if seconds else None,
        "strategy_seconds": [[name, value] for name, value in (entry.get("strategy_seconds") or {}).items()],
    }


def figures(entry: Mapping[str, Any]) -> Row:
    """Acceptance figures of a row from its rounds, pooled and by position (`specdec.stats`)."""
    records = [RoundRecord(*record) for record in entry.get("records") or ()]
    tally = Tally.of(records)
    tokens = entry.get("tokens") or ()
    return {
        **{name: getattr(tally, name) for name in COUNTED},
        "emitted_tokens": len(tokens),
        "distance": entry.get("distance"),
        **loops(tokens),
        **Positions.of(records)._asdict(),
    }


def at(values: Sequence[int] | None, index: int) -> int:
    """An entry of `drafted`, `tested`, `reached` or the histogram of a row; 0 beyond its end."""
    return values[index] if values is not None and index < len(values) else 0


def with_plain(kept: Sequence[Row], rows: Iterable[Row]) -> list[Row]:
    """Add the references of these rows, in the order of the table, so that speed-ups can be paired."""
    needed, chosen = {(r.get("plain"), r["prompt"]) for r in kept}, {id(r) for r in kept}
    return [r for r in rows if id(r) in chosen or (not r["drafts"] and (r.get("cell"), r["prompt"]) in needed)]


def loops(tokens: Sequence[int]) -> Row:
    """How much of a text is in a loop at its end."""
    looped = loop_tokens(tokens)
    return {"loop_tokens": looped, "loop_share": looped / len(tokens) if tokens else None}


def _gate(rows: Sequence[Row]) -> None:
    """Compare every row with its reference, in place."""
    plain = {(r["cell"], r["prompt"]): r for r in rows if not r["drafts"]}
    for row in rows:
        row["equals_plain"] = row["first_difference"] = None
        reference = plain.get((row["plain"], row["prompt"]))
        sound = reference is not None and row["status"] == reference["status"] == "ok"
        if reference is not None and sound and row["drafts"] and row["comparable"]:
            row["first_difference"] = first_difference(row["tokens"], reference["tokens"])
            row["equals_plain"] = row["first_difference"] is None


def with_references(rows: Sequence[Row]) -> None:
    """Give every row what its reference counted, as `plain_NAME`, in place: a table that is filtered keeps its
    speed-ups."""
    plain = {(r.get("cell"), r.get("prompt")): r for r in rows if not r.get("drafts") and r.get("status") == "ok"}
    for row in rows:
        found = plain.get((row.get("plain"), row.get("prompt"))) if row.get("drafts") else None
        for name in REFERENCE:
            if found is not None or f"plain_{name}" not in row:
                row[f"plain_{name}"] = None if found is None else found.get(name)


# -- Parquet ----------------------------------------------------------------------------------------------------------


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write rows as Parquet; nested lists of mixed types go as JSON texts. A reader finds the old file or the new."""
    arrow = need("pyarrow.parquet", "tables need", "research")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    plain = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        if name in ("records", "strategy_seconds"):
            values = [None if v is None else json.dumps(v) for v in values]
        elif len({type(v) for v in values if v is not None}) > 1 or any(isinstance(v, dict) for v in values):
            values = [None if v is None else v if isinstance(v, str) else json.dumps(v) for v in values]
        plain[name] = [v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values]
    made = io.BytesIO()
    arrow.parquet.write_table(arrow.table(plain), made)
    write_file(path, made.getvalue(), "table")


def as_rows(results: Any) -> list[Row]:
    """A results table in any form - rows, `Results`, a pandas or pyarrow table, a Parquet file or an ablation's folder
    - as rows."""
    if isinstance(results, (str, Path)):
        path = as_path(results, "results table")
        path = path / TABLE if is_folder(path) else path
        if not is_file(path):
            unmerged = is_file(path.parent / "run.json")
            hint = ": the ablation is not finished; specdec ablate merge FOLDER --partial makes one" if unmerged else ""
            raise SpecdecError(f"no results table at {path}{hint}")
        arrow = need("pyarrow.parquet", "tables need", "research")
        try:
            results = arrow.parquet.read_table(path)
        except (OSError, arrow.ArrowException) as error:
            raise SpecdecError(f"{path} is no results table: {str(error).splitlines()[0]}") from error
    if hasattr(results, "to_pylist"):
        results = results.to_pylist()
    elif hasattr(results, "to_dict") and hasattr(results, "columns"):  # a data frame
        results = [{n: _plain(v) for n, v in row.items()} for row in results.to_dict("records")]
    elif hasattr(results, "dimensions"):
        results = results.rows
    if not isinstance(results, Iterable) or isinstance(results, Mapping):
        raise SpecdecError(f"expected a results table, got {type(results).__name__}")
    rows = []
    for row in results:
        if not isinstance(row, Mapping):
            raise SpecdecError(f"expected rows of a results table, got {type(row).__name__}")
        rows.append(dict(row))
        for name in ("records", "strategy_seconds"):
            if isinstance(row.get(name), str):
                rows[-1][name] = parse_json(row[name], f"results table, column {name}")
        if "loop_tokens" not in row:  # of an older table
            rows[-1].update(loops(row.get("tokens") or ()))
        rows[-1].setdefault("distance", None)
    with_references(rows)
    return rows


def _plain(value: Any) -> Any:
    """A data frame's value as Python's own: nothing for NaN, and whole numbers that NaN beside them made floats."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, float):
        return None if value != value else int(value) if value.is_integer() else value
    return value
