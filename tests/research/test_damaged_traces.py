"""Traces whose files were changed or cut are refused in one line, which names them."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import specdec
from specdec import SpecdecError
from specdec.cli import app
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
    record(decoder, prompts, 6, temperature=0.7, strategies=chain, top=2, ids=["[/red]", "b"]).save(made / "chain")
    tree = [specdec.DraftModel(tree="2x2")]
    record(decoder, prompts, 5, temperature=0.7, strategies=tree, top=2).save(made / "tree")
    return made


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


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_a_trace_that_was_changed_is_refused(folder: Path, name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    document = json.loads((folder / f"{name}.json").read_text())
    data = (folder / f"{name}.safetensors").read_bytes()
    rng = random.Random(name)
    own = [p for p in places(document) if len(p) > 1 or p[0] not in ("format", "version")]
    files = [(changed(document, place, drop), data) for place in rng.sample(own, 20)]
    files += [(changed(document, place, put({"odd": 1})), data) for place in rng.sample(own, 20)]
    files += [(document, data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :]) for n in rng.sample(range(len(data)), 20)]
    files += [(document, data[:-1]), (document, b"")]
    for text, numbers in files:
        path.write_text(json.dumps(text))
        path.with_suffix(".safetensors").write_bytes(numbers)
        with pytest.raises(SpecdecError, match=r"a\.json and a\.safetensors are not as they were written together"):
            Trace.load(path)
    done = CliRunner().invoke(app, ["trace", "show", str(path)])
    assert (done.exit_code, done.stdout) == (2, "")
    path.write_text(json.dumps(document, indent=1))  # control: the same contents, laid out otherwise
    path.with_suffix(".safetensors").write_bytes(data)
    assert Trace.load(path) == Trace.load(folder / name)


def test_names_with_markup_are_shown_as_they_stand(folder: Path) -> None:
    for options in ((), ("--rounds",)):
        done = CliRunner().invoke(app, ["trace", "show", str(folder / "chain"), *options])
        assert done.exit_code == 0, done.output
        assert "[/red]" in done.stdout
