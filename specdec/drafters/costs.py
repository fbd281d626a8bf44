"""Cost tables, from which automatic draft length chooses (drafters/length.py, docs/automatic_length.md).

`nominal_costs` computes a table from the models' sizes, data types and kind of device: the same on every machine, so
that a run can be repeated. `measure_costs` times this machine once; its table is frozen, and can be a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from specdec.config import check_number, check_whole
from specdec.errors import SpecdecError
from specdec.files.texts import as_path, dump_yaml_text, is_file, read_json, read_yaml, write_atomically
from specdec.models.runner import Runner

Table = tuple[tuple[tuple[float, ...], ...], ...]

WIDTHS = (1, 2, 3, 5, 9, 13, 17)
CONTEXTS = (128, 1024)
MANY = 4  # tokens
SMALL = 1 << 23  # weights of a layer and its share of the head: all products are sums where rows are one or two
AROUND = 5e-5  # seconds that chain and engine take around a call
SOURCES = ("nominal", "measured")
CALL_SECONDS = 5e-5 + AROUND  # per row, of a strategy that was not timed
SUFFIX_SECONDS = 3e-4


def check_axes(batches: Sequence[int], contexts: Sequence[int], widths: Sequence[int], least_context: int = 0) -> None:
    """Raise SpecdecError unless these are a table's axes: ascending whole numbers, batches and widths from 1, at least
    two widths."""
    axes = (("batches", batches, 1, 1), ("contexts", contexts, least_context, 1), ("widths", widths, 1, 2))
    for name, given, first, least in axes:
        check_sequence(name, given)
        values = list(given)
        for value in values:
            check_whole(f"costs: {name}", value, first)
        if len(values) < least or values != sorted(set(values)) or (name != "contexts" and values[0] != 1):
            start = "" if name == "contexts" else " from 1"
            raise SpecdecError(f"costs: {name} must be {least} or more numbers that ascend{start}, got {values}")


def check_sequence(name: str, values: Any) -> None:
    """Raise SpecdecError for anything but a sequence."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise SpecdecError(f"costs: {name} must be a sequence of whole numbers, got {values!r}")


@dataclass(frozen=True)
class CostTable:
    """Seconds of passes by batch, context and width. Raises SpecdecError for a table of another form.

    target, draft: seconds of one pass, [batches][contexts][widths]; draft is None without a draft model
    batches: rows, ascending from 1
    contexts: tokens of the text, ascending
    widths: tokens per row, ascending from 1
    round: seconds of a round without its passes
    calls: seconds of one row's call of a strategy without a model, by name
    device: in words
    source: "nominal" or "measured"
    """

    target: Table
    draft: Table | None = None
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (0,)
    widths: tuple[int, ...] = (1, 2)
    round: float = 0.0
    calls: Mapping[str, float] = field(default_factory=dict)
    device: str = ""
    source: str = "nominal"

    def __post_init__(self) -> None:
        check_axes(self.batches, self.contexts, self.widths)
        for name in ("batches", "contexts", "widths"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_number("costs: round", self.round, 0.0, math.inf)
        if not isinstance(self.calls, Mapping) or not all(isinstance(name, str) for name in self.calls):
            raise SpecdecError(f"costs: calls must map names of strategies to seconds, got {self.calls!r}")
        for name, seconds in self.calls.items():
            check_number(f"costs: calls of {name!r}", seconds, 0.0, math.inf)
        if self.source not in SOURCES or not isinstance(self.device, str):
            kinds = " or ".join(SOURCES)
            raise SpecdecError(f"costs: source must be {kinds}, device a text, got {self.source!r}, {self.device!r}")
        object.__setattr__(self, "target", self._checked("target", self.target))
        if self.draft is not None:
            object.__setattr__(self, "draft", self._checked("draft", self.draft))

    def _checked(self, name: str, value: Any) -> Table:
        shape = (len(self.batches), len(self.contexts), len(self.widths))
        try:
            array = np.asarray(value)
            array = array.astype(np.float64) if array.dtype.kind in "iuf" else np.zeros(0)  # no texts, no bools
        except ValueError:
            array = np.zeros(0)
        if array.shape != shape or not np.isfinite(array).all() or (array <= 0).any():
            raise SpecdecError(f"costs: {name} must hold positive seconds by batch, context and width, {shape}")
        return tuple(tuple(tuple(row) for row in block) for block in array.tolist())

    def seconds(self, role: str, batch: int, context: int, width: int) -> float:
        """Return seconds of one pass of `role` ("target" or "draft") over `width` tokens in each of `batch` rows.

        Linear between entries. Beyond the largest batch or width a pass costs what as many tokens in one row would, on
        the line through the two widest entries. Raises SpecdecError for another role, a table without a draft model,
        and no rows.
        """
        if role not in ("target", "draft") or batch < 1:
            raise SpecdecError(f"costs: expected target or draft and one row or more, got {role!r}, {batch!r}")
        table = self.target if role == "target" else self.draft
        if table is None:
            raise SpecdecError("costs: the table has no draft model")
        index = max(i for i, b in enumerate(self.batches) if b <= batch)
        tokens = width * batch / self.batches[index]
        column = [_line(tokens, self.widths, row) for row in table[index]]
        return float(np.interp(context, self.contexts, column))

    def call(self, name: str) -> float:
        """Return seconds of one row's call of a strategy without a model."""
        return self.calls.get(name, SUFFIX_SECONDS if name == "suffix" else CALL_SECONDS)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        made: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return made

    @staticmethod
    def from_dict(data: Any, where: str = "costs") -> CostTable:
        """Read the table that `to_dict` wrote. Raises SpecdecError for anything else."""
        known = {f.name for f in fields(CostTable)}
        if not isinstance(data, Mapping) or "target" not in data or not set(data) <= known:
            raise SpecdecError(f"{where}: not a cost table; its keys are {', '.join(sorted(known))}")
        return CostTable(**data)

    def save(self, path: str | Path) -> None:
        """Write a file for `load`: YAML if its name ends so, else JSON. Raises OSError."""
        plain, file = self.to_dict(), as_path(path, "costs")
        text = dump_yaml_text(plain) if _is_yaml(file) else json.dumps(plain, indent=1) + "\n"
        write_atomically(file, text)

    @staticmethod
    def load(path: str | Path) -> CostTable:
        """Read a file of `save`. Raises SpecdecError for a missing file, or one without a cost table."""
        file = as_path(path, "costs")
        if not is_file(file):
            raise SpecdecError(f"costs: {path} cannot be read: there is no such file")
        read = read_yaml if _is_yaml(file) else read_json
        return CostTable.from_dict(read(file, "costs"), str(path))


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def as_costs(value: Any) -> CostTable | None:
    """Read a table as users give it: None, a CostTable, its plain data, or the path of a file. Raises SpecdecError."""
    if value is None or isinstance(value, CostTable):
        return value
    if isinstance(value, Mapping):
        return CostTable.from_dict(value)
    if isinstance(value, (str, Path)):
        return CostTable.load(value)
    raise SpecdecError(f"costs must be a CostTable, its data, or the path of a file, got {value!r}")


def _line(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    if x <= xs[-1]:
        return float(np.interp(x, xs, ys))
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
    return ys[-1] + slope * (x - xs[-1])


# -- nominal ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Machine:
    """A kind of device.

    bandwidth: bytes per second
    arithmetic: operations per second
    layer: seconds of a layer in addition
    launch: a layer's least seconds, because the host starts its kernels one by one
    repeat: part of the weights that passes of MANY tokens and more read again, by another kernel
    product: seconds of a layer in addition whose products are sums in passes of few tokens (small_matmul_pass.py)
    """

    bandwidth: float
    arithmetic: float
    layer: float
    launch: float = 0.0
    repeat: float = 0.0
    product: float = 0.0

    def seconds(self, runner: Runner, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return seconds of passes of `tokens`: every weight is read, and a token takes two operations per weight."""
        count, size = runner.read_in_a_pass
        layers = int(getattr(runner.config, "num_hidden_layers", 1))
        product = self.product * (count < layers * SMALL)
        reading = size / self.bandwidth
        each = 2.0 * count / self.arithmetic

        def one(n: int) -> float:
            read = reading * (1.0 + self.repeat * (n >= MANY))
            layer = self.layer + product * (n >= MANY - 1)
            return max(layers * self.launch, layers * layer + read + each * n)

        return tuple(one(n) for n in tokens)


# Fitted to SmolLM2-135M in float32 on two cores (44, 65 and 88 ms for 1, 5 and 9 tokens; on another machine 90, 167 and
# 205, with 98 for 3 and 165 for 4; with oneDNN's products 44, 52 and 60 ms, and 74 for 17), and to Llamas in bfloat16
# on an H100. 8B: 23-24 ms eagerly; 9.1, 9.9 and 10.3 ms for 1, 8 and 16 tokens from recorded kernels; 7.4 and 7.6 for 1
# and 8, compiled. 1B: 2.6 recorded, 1.8 compiled. Draft steps of a compiled 135M model took 0.8 ms on an H200, nearly
# all of it for the kernels of its 30 layers, and 1.1 ms for 8 rows, whose products are no sums. A compiled 6.4B target
# took 4.66 ms for 8 tokens there and 4.97 for 64, since reading the weights hides their arithmetic.
_CPU = _Machine(bandwidth=17e9, arithmetic=60e9, layer=2.5e-4, repeat=0.3)
_ONEDNN = _Machine(bandwidth=15.5e9, arithmetic=145e9, layer=2.5e-4)
_EAGER = _Machine(bandwidth=2.2e12, arithmetic=150e12, layer=8e-5, launch=7.2e-4)
_RECORDED = _Machine(bandwidth=2.2e12, arithmetic=150e12, layer=8e-5)
_COMPILED = _Machine(bandwidth=2.2e12, arithmetic=1500e12, layer=2.5e-5, product=9e-6)
_ROUND, _RECORDED_ROUND = 1.5e-3, 3e-4


def _machine(runner: Runner) -> _Machine:
    if runner.device.type == "cpu":
        return _ONEDNN if runner.onednn else _CPU
    return {"off": _EAGER, "graph": _RECORDED}.get(runner.mode, _COMPILED)


def nominal_costs(target: Runner, draft: Runner | None = None) -> CostTable:
    """Compute a table from sizes, data types, kind of device and compile mode: the same wherever these are the same."""
    widths = (1, MANY - 1, MANY, 17)
    passes = _machine(target).seconds(target, widths)
    steps = None if draft is None else ((_machine(draft).seconds(draft, widths),),)
    outside = _RECORDED_ROUND if _machine(target) in (_RECORDED, _COMPILED) else _ROUND
    return CostTable(((passes,),), steps, (1,), (0,), widths, outside, device=target.device.type, source="nominal")


def costs_for(
    drafters: Sequence[Any], chosen: Sequence[bool], given: CostTable | None, target: Runner, draft: Runner | None
) -> CostTable:
    """Return the table from which lengths are chosen. Raises SpecdecError if it lacks the draft model they need.

    chosen: the strategies whose length is automatic
    """
    check_costs(drafters, chosen, given)
    return given or nominal_costs(target, draft)


def check_costs(drafters: Sequence[Any], chosen: Sequence[bool], given: CostTable | None) -> None:
    """Raise SpecdecError if a draft model's length is chosen from a table without one."""
    model = any(a and d.uses_draft_model for d, a in zip(drafters, chosen, strict=True))
    if given is not None and model and given.draft is None:
        raise SpecdecError("costs: the table has no draft model, and the length of draft-model is automatic")
