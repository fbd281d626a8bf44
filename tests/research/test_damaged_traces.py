"""Traces edited by hand: refused in one line, or fit for everything that looks at a trace; nothing crashes or hangs."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save
from typer.testing import CliRunner

import specdec
from specdec import SpecdecError
from specdec.cli import app
from specdec.research.offline.replay import model_free_chain, replay
from specdec.research.traces.analysis import DIMENSIONS, analyse, by_position
from specdec.research.traces.trace import Trace, record
from tests.helpers.playing import looping, random_ids, weaker
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level

ODD = (None, True, -1, 0, 1, 10**9, 10**40, 0.5, math.nan, math.inf, "", "x", "[/red]", [], [[]], {}, {"a": 1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small traces: chains of two strategies, and trees."""
    tokenizer = byte_level(128)
    target = looping(tiny_model("llama", 5, vocab=len(tokenizer)))
    decoder = specdec.SpeculativeDecoder(target, weaker(target, 0.3), tokenizer, check=False)
    made = tmp_path_factory.mktemp("traces")
    prompts = [random_ids(5, 1), random_ids(4, 2)]
    chain = ["prompt-lookup:ngram_min=1", "draft-model:n_max=3"]
    record(decoder, prompts, 6, temperature=0.7, strategies=chain, top=2, ids=["a", "b"]).save(made / "chain")
    tree = [specdec.DraftModel(tree="2x2")]
    record(decoder, prompts, 5, temperature=0.7, strategies=tree, top=2).save(made / "tree")
    return made


def use(trace: Trace) -> None:
    """Everything that looks at a trace."""
    trace.to_html()
    repr(trace)
    for name in DIMENSIONS:
        analyse(trace, (name,))
    by_position(trace)
    for index, row in enumerate(trace.rows):
        trace.of_row(index)
        if row.prompt and row.output:
            ids = [np.array(part, dtype=np.int64) for part in (row.prompt, row.output)]
            replay(model_free_chain("prompt-lookup", sum(map(len, ids))), *ids)


def load(path: Path, document: Any, arrays: dict[str, np.ndarray]) -> Trace | None:
    """The trace, used; None where it is refused in one line. `path` is the JSON file's."""
    data = save(arrays)
    path.with_suffix(".safetensors").write_bytes(data)
    if isinstance(document, dict) and isinstance(document.get("arrays"), dict):
        document["arrays"]["sha256"] = hashlib.sha256(data).hexdigest()
    path.write_text(json.dumps(document))
    try:
        trace = Trace.load(path)
    except SpecdecError as error:
        message = str(error)
    else:
        use(trace)
        return trace
    assert "\n" not in message
    assert path.name in message or path.with_suffix(".safetensors").name in message
    return None


def read(folder: Path, name: str) -> tuple[Any, dict[str, np.ndarray]]:
    return json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where parts of a document stand."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inside:
        yield (*path, name)
        yield from places(part, (*path, name))


def changed(document: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    made = copy.deepcopy(document)
    inside = made
    for name in path[:-1]:
        inside = inside[name]
    change(inside, path[-1])
    return made


def put(value: Any) -> Callable[[Any, Any], None]:
    return lambda inside, name: inside.__setitem__(name, value)


def drop(inside: Any, name: Any) -> None:
    del inside[name]


SHARE = pytest.mark.parametrize("share", [0.08, pytest.param(1.0, marks=pytest.mark.full)])


@SHARE
@pytest.mark.parametrize("name", ["chain", "tree"])
def test_no_change_of_the_json_file_breaks_what_looks_at_a_trace(
    folder: Path, name: str, share: float, tmp_path: Path
) -> None:
    document, arrays = read(folder, name)
    assert load(tmp_path / "a.json", copy.deepcopy(document), arrays) is not None
    own = [p for p in places(document) if p[0] not in ("stats", "provenance") or len(p) < 3]
    rng, refused = random.Random(name), 0
    own = rng.sample(own, int(share * len(own)))
    for path in own:
        changes = [drop, *map(put, rng.sample(ODD, 2))]
        refused += sum(load(tmp_path / "a.json", changed(document, path, c), arrays) is None for c in changes)
    assert refused > len(own)


def spoiled(arrays: dict[str, np.ndarray], name: str, rng: random.Random) -> Iterator[dict[str, np.ndarray]]:
    """Changes of one array: gone, shorter, longer, of another type or shape, and single values."""
    array = arrays[name]
    yield {k: v for k, v in arrays.items() if k != name}
    for other in (array[:-1], np.concatenate([array, array[:1]]), array.astype(np.float16), array[None]):
        yield {**arrays, name: np.ascontiguousarray(other)}
    whole = array.dtype.kind in "iu"
    values = (
        (0, 1, 2, 5, 100, *((-1, -2) if array.dtype.kind == "i" else ())) if whole else (-1.0, 2.0, math.nan, math.inf)
    )
    for value in values:
        made = array.copy()
        if made.size:
            made.flat[rng.randrange(made.size)] = value
            yield {**arrays, name: made}


@SHARE
@pytest.mark.parametrize("name", ["chain", "tree"])
def test_no_change_of_the_arrays_breaks_what_looks_at_a_trace(
    folder: Path, name: str, share: float, tmp_path: Path
) -> None:
    document, arrays = read(folder, name)
    rng = random.Random(name)
    changes = [change for array in arrays for change in spoiled(arrays, array, rng)]
    changes = rng.sample(changes, int(share * len(changes)))
    refused = sum(load(tmp_path / "a.json", copy.deepcopy(document), change) is None for change in changes)
    assert refused > len(changes) / 2


DAMAGE: list[tuple[str, str, tuple[Any, ...], Any, str]] = [
    ("chain", "json", ("rows", 0, "output", 1), -3, r"rows\[0\]\.output\[1\]"),
    ("chain", "json", ("rows", 1, "prompt"), "text", r"rows\[1\]\.prompt"),
    ("chain", "json", ("rows", 1, "finish_reason"), None, r"rows\[1\]\.finish_reason"),
    ("chain", "json", ("rows", 1, "pieces"), ["a"], r"rows\[1\]\.pieces: 1 of 6"),
    ("chain", "json", ("stats", "emitted_tokens"), 99, "stats.emitted_tokens is 99"),
    ("chain", "json", ("stats", "tokens_per_round"), "many", "stats.tokens_per_round"),
    ("chain", "json", ("provenance",), [], "provenance"),
    ("chain", "json", ("names", "strategy"), {"a": 1}, "names.strategy"),
    ("chain", "json", ("tokens", "x"), "a", "'x' is no token id"),
    ("chain", "json", ("arrays",), 3, "arrays: expected a mapping"),
    ("chain", "arrays", ("accepted", 0), 50, "damaged"),
    ("chain", "arrays", ("row", 0), 7, "round 0: row: expected 0 to 1"),
    ("chain", "arrays", ("strategy", 0), 9, r"strategy\[0\]: expected -1 to"),
    ("chain", "arrays", ("p", 0), math.nan, r"p\[\d\]: expected 0 to"),
    ("chain", "arrays", ("position", 1), 0, "position"),
    ("chain", "arrays", ("seconds", 0), math.nan, "seconds"),
    ("tree", "arrays", ("parents", 0), 0, r"parents\[0\]: expected -1 to -1, got 0"),
    ("tree", "arrays", ("parents", 2), 3, r"parents\[2\]: expected -1 to 1, got 3"),
    ("tree", "arrays", ("parents", 1), -2, r"parents\[1\]"),
]


@pytest.mark.parametrize(("name", "file", "path", "value", "message"), DAMAGE, ids=[str(d[2]) for d in DAMAGE])
def test_a_damaged_trace_is_refused_by_file_and_field(
    folder: Path, name: str, file: str, path: tuple[Any, ...], value: Any, message: str, tmp_path: Path
) -> None:
    document, arrays = read(folder, name)
    if file == "json":
        document = changed(document, path, put(value))
    else:
        arrays[path[0]] = arrays[path[0]].copy()
        arrays[path[0]].flat[path[1]] = value
    assert file == "json" or path[0] in arrays
    target = tmp_path / "a.json"
    data = save(arrays)
    target.with_suffix(".safetensors").write_bytes(data)
    if isinstance(document["arrays"], dict):
        document["arrays"]["sha256"] = hashlib.sha256(data).hexdigest()
    target.write_text(json.dumps(document))
    with pytest.raises(SpecdecError, match=message):
        Trace.load(target)
    done = CliRunner().invoke(app, ["trace", "show", str(target)])
    assert (done.exit_code, done.stdout) == (2, "")


def test_names_with_markup_are_shown_as_they_stand(folder: Path, tmp_path: Path) -> None:
    document, arrays = read(folder, "chain")
    document["rows"][0]["id"] = "[/red]"
    assert load(tmp_path / "a.json", document, arrays) is not None
    for options in ((), ("--rounds",)):
        done = CliRunner().invoke(app, ["trace", "show", str(tmp_path / "a.json"), *options])
        assert done.exit_code == 0, done.output
        assert "[/red]" in done.stdout
