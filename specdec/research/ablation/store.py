"""The folder of an ablation: what was asked for, on what, and which rows are done.

- `run.json`: the config, its cells and prompts, versions and machine, and the models of each pair once it was loaded;
- `journal-*.jsonl`: rows as they were finished, one file a process;
- `table.parquet`, `summary.json`, `report.html`: made from these two by `merge`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.files.forms import ANYTHING, BOOL, INTEGER, TEXT, WHOLE, MapOf, Maybe, check, number, shown, whole
from specdec.files.own_code import source_hash
from specdec.files.texts import as_path, is_file, parse_json, read_bytes, write_file
from specdec.research.ablation.config import AblationConfig, Cell, content_hash
from specdec.research.ablation.journal import read_journals
from specdec.research.bench import origin
from specdec.research.prompts.datasets import Prompt, by_turn

MANIFEST = "run.json"
CELL = {
    "key": TEXT, "plain": TEXT, "comparable": BOOL, "pair": TEXT, "chain": TEXT, "strategies": [MapOf(ANYTHING)],
    "generation": {"acceptance": TEXT}, "settings": MapOf(ANYTHING), "seed": INTEGER, "batch_size": whole(1),
}  # fmt: skip
PROMPT = {"id": TEXT, "category": TEXT, "fingerprint": TEXT, "text": TEXT}
DESCRIPTION = {"config": MapOf(ANYTHING), "cells": [ANYTHING], "prompts": [ANYTHING]}
FORM = {
    "cells": [CELL], "prompts": [PROMPT], "date": TEXT, "commit": Maybe(TEXT),
    "versions": dict.fromkeys(("specdec", "torch", "transformers"), TEXT),
    "machine": {"gpu": Maybe(TEXT), "processor": Maybe(TEXT), "threads": Maybe(WHOLE)},
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What an ablation consists of: every row is one (cell, prompt)."""

    config: AblationConfig
    cells: list[Cell]
    prompts: list[Prompt]

    @staticmethod
    def make(config: AblationConfig) -> Plan:
        """Raises SpecdecError for prompts that cannot be read."""
        prompts = config.data.load(config.prompts)
        return Plan(config, config.expand(), by_turn(prompts) if config.data.turns == "all" else prompts)

    def fingerprint(self, prompt: Prompt) -> str:
        """What a prompt's ids depend on, the tokenizer apart."""
        before = prompt.turns[: prompt.turn - 1]
        data = self.config.data
        return content_hash([prompt.text, data.chat, data.longest, *prompt.messages, *before])

    def own_code(self) -> dict[str, str]:
        """Hashes of the files of the user's own strategies and rules."""
        names = [s["name"] for cell in self.cells for s in cell.strategies]
        names += [str(cell.generation["acceptance"]) for cell in self.cells]
        found = {name: source_hash(name) for name in names}
        return {name: made for name, made in found.items() if made is not None}

    def manifest(self) -> dict[str, Any]:
        """What run.json holds."""
        return {
            "config": self.config.to_dict(),
            **origin(),
            "own_code": self.own_code(),
            "cells": [cell_to_dict(cell) for cell in self.cells],
            "prompts": [
                {
                    **{"id": p.id, "category": p.category, "fingerprint": self.fingerprint(p), "text": p.text},
                    **({"turn": p.turn, "conversation": p.conversation} if p.turn > 1 else {}),
                }
                for p in self.prompts
            ],
        }


@dataclass
class Store:
    """What a folder holds: the newest row of each (cell, prompt), facts about pairs, sessions of the runner."""

    folder: Path
    rows: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the key of a pair's first cell
    sessions: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def open(folder: Path, plan: Plan, extend: bool = False) -> Store:
        """Start or resume.

        extend: resume although the config or the versions changed, and keep the rows whose settings are still asked
        for. Raises SpecdecError for a change without it, unless the folder has no row yet.
        """
        try:
            as_path(str(folder), "ablation").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecdecError(f"cannot write {folder}: {error.strerror}") from error
        store = Store(folder)
        old, new, changed = store.resume(plan, extend)
        if changed:
            write_file(folder / MANIFEST, _text({**new, "models": old.get("models", {})}), "description")
        return store

    def resume(self, plan: Plan, extend: bool = False) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """The folder's description, {} in a new one, the plan's, and what changed. Raises SpecdecError as `open`."""
        new = plan.manifest()
        old = read_checked(self.folder) if (self.folder / MANIFEST).exists() else {}
        changed = _changes(old, new) if old else [MANIFEST]
        if old and changed and not extend and self.read().rows:
            raise SpecdecError(
                f"{self.folder} holds another ablation: {', '.join(changed)} changed; give another folder, or --extend "
                "to keep the rows whose settings are still asked for"
            )
        return old, new, changed

    def name_models(self, pair: str, models: Mapping[str, Any]) -> None:
        """Write into run.json what the models of a pair are, by role; axes of loading options give a pair several."""
        with _locked(self.folder):  # the processes of a launch write to one file
            known = read_manifest(self.folder)
            named = known.get("models", {})
            if models not in named.get(pair, []):
                named[pair] = [*named.get(pair, []), models]
                write_file(self.folder / MANIFEST, _text({**known, "models": named}), "description")

    def read(self) -> Store:
        """Read the journals."""
        self.sessions = []
        for entry in read_journals(self.folder):
            if entry.get("kind") == "row":
                self.rows[entry["cell"], entry["prompt"]] = entry
            elif entry.get("kind") == "facts":
                self.facts[entry["cell"]] = entry["facts"]
            elif entry.get("kind") == "session":
                self.sessions.append(entry)
        return self

    def done(self, cell: Cell, prompt: Prompt, fingerprint: str, retry_errors: bool = False) -> bool:
        """Whether the row is there, made from the same prompt."""
        row = self.rows.get((cell.key, prompt.id))
        if row is None or row["fingerprint"] != fingerprint:
            return False
        return not (retry_errors and row["status"] == "error")

    def check_weights(self, cells: Iterable[Cell], weights: Mapping[str, str]) -> None:
        """Raise SpecdecError if a row of these cells was made with other weights."""
        keys = {cell.key: cell.pair for cell in cells}
        for (key, _), row in self.rows.items():
            if key in keys and row.get("weights") is not None and row["weights"] != dict(weights):
                raise SpecdecError(
                    f"{self.folder} holds rows of other weights of the pair {keys[key]!r}: give another folder"
                )

    def overhead(self) -> dict[str, float | int | None]:
        """What the runner cost relative to decoding, over all sessions that ended by themselves; times in seconds."""
        total = {name: sum(s[name] for s in self.sessions) for name in ("rows", "wall", "load", "decode")}
        rest = total["wall"] - total["load"] - total["decode"]
        share = rest / total["decode"] if total["decode"] else None
        return {**total, "sessions": len(self.sessions), "overhead": share}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The description in an ablation's folder. Raises SpecdecError for another folder."""
    path = as_path(str(folder), "ablation") / MANIFEST
    if not is_file(path):
        raise SpecdecError(f"{folder} is not the folder of an ablation: it has no {MANIFEST}")
    try:
        data = parse_json(read_bytes(path, "description").decode("utf-8", "surrogatepass"), str(path))
    except UnicodeDecodeError as error:
        raise SpecdecError(f"{path} cannot be read as UTF-8 text: {error.reason}") from None
    check(data, DESCRIPTION, f"{path} is not the description of an ablation")
    return dict(data)


def read_checked(folder: Path) -> dict[str, Any]:
    """The same with all parts checked. Raises SpecdecError also for a part that no run can have written."""
    made, where = read_manifest(folder), f"{folder / MANIFEST} is damaged"
    check(made, FORM, where)
    check(made.get("own_code", {}), MapOf(TEXT), f"{where}: own_code")
    check(made.get("models", {}), MapOf([MapOf(MapOf(Maybe(TEXT)))]), f"{where}: models")
    for i, cell in enumerate(made["cells"]):
        check(cell["generation"].get("temperature", 0.0), number(0.0), f"{where}: cells[{i}].generation.temperature")
    for name in ("key", "id"):
        entries = made["cells" if name == "key" else "prompts"]
        twice = [value for value, count in Counter(entry[name] for entry in entries).items() if count > 1]
        if twice:
            raise SpecdecError(f"{where}: the {name} {shown(twice[0])} occurs twice")
    return made


def cell_to_dict(cell: Cell) -> dict[str, Any]:
    """A cell as plain data, its reference by key."""
    given = {name: value for name, value in vars(cell.models).items() if value is not None}
    own = ("key", "comparable", "pair", "chain", "seed", "batch_size")
    return {
        **{name: getattr(cell, name) for name in own},
        "plain": cell.plain().key,
        "models": {k: v if isinstance(v, (str, bool, int, float)) else str(v) for k, v in given.items()},
        "strategies": [dict(s) for s in cell.strategies],
        "generation": dict(cell.generation),
        "settings": dict(cell.settings),
    }


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep the other processes of a launch out."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=1, ensure_ascii=False, default=str) + "\n"


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Which parts differ, in words."""
    new = json.loads(_text(new))
    parts = {**old["config"], **new["config"]}
    changed = [name for name in parts if old["config"].get(name) != new["config"].get(name)]
    if not changed and [p["fingerprint"] for p in old["prompts"]] != [p["fingerprint"] for p in new["prompts"]]:
        changed.append("the prompts of the set")
    if not changed and [c["key"] for c in old["cells"]] != [c["key"] for c in new["cells"]]:
        changed.append("the meaning of the settings")
    old_code, new_code = old.get("own_code", {}), new["own_code"]
    changed += [f"the file of {name}" for name in new_code if old_code.get(name, new_code[name]) != new_code[name]]
    for name, version in new["versions"].items():
        if old["versions"].get(name) != version:
            changed.append(f"{name} ({old['versions'].get(name)} to {version})")
    return changed
