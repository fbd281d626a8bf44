"""torch.compile for a model's passes: layer by layer, or, where a model does not allow that, as a whole.

The layers of a model share their code and differ in their weights. Compiled as one function of (layer, inputs), they
take one compilation together, in seconds, where the whole model takes one of all its layers, in half a minute and
more. What that costs: nothing is fused across the border of two layers.

A layer that is compiled for all must not name itself: instead of the cache and its own index it is given its part of
the cache (`LayerCache`). Models whose layers ask the cache for anything else are compiled as a whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.kv_cache import RaggedCache, RaggedLayer

# dynamo gives up on a function that it has compiled so often; each shape of a pass is one compilation.
RECOMPILE_LIMIT = 256

log = logging.getLogger("specdec")


def keep_compiled_code() -> Path:
    """Where compiled code is kept for later processes: torch's own setting, or a folder of the user's cache (torch's
    default lies in the folder for temporary files)."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(home) / "specdec" / "inductor")))


def compiled_before() -> dict[str, int]:
    """How often this process has found a compiled graph on disk, and how often it has not."""
    counts = torch._dynamo.utils.counters["inductor"]
    return {name: counts[f"fxgraph_cache_{kind}"] for name, kind in (("found", "hit"), ("compiled", "miss"))}


class Forward(Protocol):
    """Stands for the model in a pass."""

    def __call__(self, **arguments: Any) -> Any:
        """The model's outputs."""


class Compiler:
    """torch.compile with what all compiled passes share. Whole graphs are asked for first (`whole`); what dynamo must
    break up is compiled in parts."""

    def __init__(self, name: str, mode: str, backend: str = "inductor"):
        self.name, self.backend = name, backend
        # Kernels are tuned one by one, and products with one row become such kernels. Trials between matrix kernels
        # ("max-autotune") are left out: they chose slower ones for 8 rows (docs/speed.md).
        self.options: dict[str, Any] | None = {"coordinate_descent_tuning": True} if mode == "max" else None
        self.whole = True
        keep_compiled_code()

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled. dynamo counts by code object and may give one up: each model has its own."""
        own = FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
        )  # fmt: skip
        return torch.compile(
            own, fullgraph=self.whole, dynamic=False, backend=self.backend, options=self.options
        )  # fmt: skip

    def run(self, call: Callable[[], Any], again: Callable[[], None]) -> Any:
        """What `call` makes with compiled functions. Where dynamo cannot trace it whole, parts are allowed from then
        on: `again` compiles anew, and it is called once more."""
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=RECOMPILE_LIMIT):
            try:
                return call()
            except torch._dynamo.exc.Unsupported as error:
                if not self.whole:
                    raise
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                log.warning("%s is compiled in parts: %s", self.name, reason)
                self.whole = False
                again()
                return call()


class CompiledFunction:
    """One function, one compilation a shape; of a model that is left as it is, all of its layers one after another."""

    def __init__(self, function: Callable[..., Any], compiler: Compiler):
        self.function, self.compiler = function, compiler
        self._compile()

    def _compile(self) -> None:
        def call(*given: Any, **named: Any) -> Any:
            return self.function(*given, **named)

        self.compiled = self.compiler.compile(call)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.compiler.run(lambda: self.compiled(*given, **named), self._compile)


class LayerCache:
    """One layer's part of a cache, as the layer sees it. The index that it gives is not looked at: a compiled function
    that had looked would be one layer's own."""

    def __init__(self, layer: RaggedLayer):
        self.layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `Cache.update`."""
        return self.layer.update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As `RaggedLayer.get_seq_length`."""
        return 0


class CompiledLayers:
    """A model whose layers run as one compiled function, and with them the norm that follows. `layers` and `siblings`
    as `layers_of` finds them; the model is changed for the time of a pass only."""

    def __init__(self, model: Any, layers: Sequence[nn.Module], siblings: Sequence[nn.Module], compiler: Compiler):
        self.model, self.compiler = model, compiler
        self.layers, self.siblings = list(layers), list(siblings)
        self._compile()
        self.states: list[Tensor] | None = None  # hidden states of the pass that goes on, where they are wanted

    def _compile(self) -> None:
        def forward(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return type(module).forward(module, *given, **named)

        self.compiled = self.compiler.compile(forward)

    def __call__(self, **arguments: Any) -> Any:
        # transformers collects hidden states by hooks that dynamo cannot trace, and leaves them in the model.
        wanted = len(self.siblings) == 1 and arguments.pop("output_hidden_states", False)
        out = self.compiler.run(lambda: self._pass(arguments, wanted), self._compile)
        if self.states is not None:
            out.hidden_states, self.states = tuple(self.states), None
        return out

    def _pass(self, arguments: dict[str, Any], wanted: bool) -> Any:
        self.states = [] if wanted else None
        with self._on():
            return self.model(**arguments)

    @contextmanager
    def _on(self) -> Iterator[None]:
        modules = [*enumerate(self.layers), *((None, sibling) for sibling in self.siblings)]
        try:
            for index, module in modules:
                vars(module)["forward"] = self._forward(module, index)
            yield
        finally:
            for _, module in modules:
                vars(module).pop("forward", None)

    def _forward(self, module: nn.Module, index: int | None) -> Callable[..., Any]:
        def part(value: Any) -> Any:
            return LayerCache(value.layers[index]) if isinstance(value, RaggedCache) else value

        def forward(*given: Any, **named: Any) -> Any:
            out = self.compiled(module, tuple(map(part, given)), {name: part(v) for name, v in named.items()})
            if self.states is not None:  # as in transformers: what each layer is given, and what the last norm returns
                self.states.append(out if index is None else given[0] if given else named["hidden_states"])
            return out

        return forward


def layers_of(model: nn.Module, count: int) -> tuple[list[nn.Module], list[nn.Module]]:
    """The model's `count` layers, and the modules beside them that are of a kind that the layers hold as well (the last
    norm). None where there is no such list, or where something has replaced the forward of one of them."""
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == count > 1:
                inside = {type(m) for layer in child for m in layer.modules()}
                siblings = [m for m in parent.children() if type(m) in inside and m is not child]
                free = not any("forward" in vars(m) for m in (*child, *siblings))
                return (list(child), siblings) if free else ([], [])
    return [], []


def compiled_forward(model: Any, config: Any, mode: str, backend: str = "inductor") -> Forward:
    """What stands for the model in compiled passes. mode: "inductor" or "max" (graphs.MODES)."""
    compiler = Compiler(type(model).__name__, mode, backend)
    layers, siblings = layers_of(model, int(getattr(config, "num_hidden_layers", 0)))
    return CompiledLayers(model, layers, siblings, compiler) if layers else CompiledFunction(model, compiler)
