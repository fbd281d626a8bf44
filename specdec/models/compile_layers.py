"""torch.compile for a model's passes: layer by layer, or as a whole if a model does not allow that.

The layers of a model share their code and differ in their weights. Compiled as one function of (layer, inputs), they
take one compilation of some seconds; the whole model takes half a minute and more. The price: nothing is fused across
the border of two layers.

A layer compiled for all must not name itself: instead of the cache and its own index it is given its part of the cache
(`LayerCache`). Models whose layers ask the cache for anything else are compiled as a whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from specdec.files.texts import first_line
from specdec.models.kv_cache import RaggedCache, RaggedLayer
from specdec.models.replaced import replaced

# dynamo gives up on a function that it has compiled so often; each shape of a pass is one compilation.
RECOMPILE_LIMIT = 256

# Parameters from which on what is around the layers is not compiled: its kernels take less than a hundredth of a pass,
# and compiling each part about a second.
LARGE = 1 << 30

log = logging.getLogger("specdec")


def keep_compiled_code() -> Path:
    """Choose the folder of compiled code for later processes: torch's setting, else one in the user's cache.

    torch's default lies in the folder for temporary files.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(home) / "specdec" / "inductor")))


def compiled_before() -> dict[str, int]:
    """Count how often this process has found a compiled graph on disk, and how often it has not."""
    counts = torch._dynamo.utils.counters["inductor"]
    return {name: counts[f"fxgraph_cache_{kind}"] for name, kind in (("found", "hit"), ("compiled", "miss"))}


class Forward(Protocol):
    """Runs in the model's place in a pass."""

    compiler: Compiler

    def __call__(self, **arguments: Any) -> Any:
        """Return the model's outputs."""


class Compiler:
    """torch.compile with the settings of all compiled passes.

    parts: what dynamo cannot trace whole is compiled in parts; False: it is not compiled
    give_up: told why something cannot be compiled, which then runs as it is; None: the error is raised
    whole: ask for whole graphs; becomes False once code is compiled in parts
    """

    def __init__(
        self,
        name: str,
        mode: str,
        backend: str = "inductor",
        parts: bool = True,
        give_up: Callable[[str], None] | None = None,
    ):
        self.name, self.mode, self.backend, self.parts, self.give_up = name, mode, backend, parts, give_up
        self.options: dict[str, Any] = {}
        # No trials: they take a tenth of the time of compiling, and choose other kernels in other processes.
        if backend == "inductor":
            self.options |= {"triton.autotune_pointwise": False, "shape_padding": False}
            # What does not depend on one another becomes one kernel: the rotations and the writes of keys and values of
            # a layer. A pass of 135M parameters took 0.74 ms instead of 0.82, one of 6.4B 4.33 instead of 4.38.
            self.options["combo_kernels"] = True
        if mode == "max":
            from specdec.models.small_matmul_pass import RowSums  # imports the compiler, which takes a second

            self.options["post_grad_custom_pre_pass"] = RowSums()
        self.whole = True
        keep_compiled_code()

    def named(self, name: str) -> Compiler:
        """Return a compiler of the same settings for something else."""
        return Compiler(name, self.mode, self.backend, self.parts, self.give_up)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function. dynamo counts by code object and may give one up, so each gets its own."""
        own = FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
        )
        return torch.compile(
            own, fullgraph=self.whole, dynamic=False, backend=self.backend, options=self.options or None
        )

    def run(self, call: Callable[[], Any], recompile: Callable[[], None], plain: Callable[[], Any]) -> Any:
        """Return what `call` returns, or `plain`, which is the same uncompiled, once the compiler fails."""
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=RECOMPILE_LIMIT):
            try:
                return self._run(call, recompile)
            except torch._dynamo.exc.TorchDynamoException as error:
                if self.give_up is None:
                    raise
                self.give_up(first_line(error))
        return plain()

    def _run(self, call: Callable[[], Any], recompile: Callable[[], None]) -> Any:
        """Call, after `recompile` if dynamo has seen too many shapes or cannot trace it whole."""
        try:
            return call()
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            recompile()  # a new code object, of which dynamo has compiled nothing yet
            return call()
        except torch._dynamo.exc.Unsupported as error:
            if not (self.whole and self.parts):
                raise
            log.warning("%s is compiled in parts: %s", self.name, first_line(error))
            self.whole = False
            recompile()
            return call()


class CompiledFunction:
    """One function, compiled once per shape. Also a model that cannot be compiled layer by layer."""

    def __init__(self, function: Callable[..., Any], compiler: Compiler):
        self.function, self.compiler = function, compiler
        self._compile()

    def _compile(self) -> None:
        def call(*given: Any, **named: Any) -> Any:
            return self.function(*given, **named)

        self.compiled = self.compiler.compile(call)

    def __call__(self, *given: Any, **named: Any) -> Any:
        def plain() -> Any:
            return self.function(*given, **named)

        return self.compiler.run(lambda: self.compiled(*given, **named), self._compile, plain)


class LayerCache:
    """One layer's part of a cache, in place of the cache. It ignores the layer's index: a compiled function that reads
    it would serve that layer only."""

    def __init__(self, layer: RaggedLayer):
        self.layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Do what `Cache.update` does."""
        return self.layer.update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Do what `RaggedLayer.get_seq_length` does."""
        return 0


class Parts(NamedTuple):
    """The parts of a model that are compiled.

    layers: its decoder layers
    norms: norms outside the layers (the last norm)
    rotations: modules that turn positions into rotations
    """

    layers: list[nn.Module]
    norms: list[nn.Module]
    rotations: list[nn.Module]


class CompiledLayers:
    """A model whose layers run as one compiled function, and if it is not `LARGE` its other parts too. It is changed
    during a pass only."""

    def __init__(self, model: Any, parts: Parts, compiler: Compiler):
        self.model, self.compiler, self.parts = model, compiler, parts
        self._compile()
        self.states: list[Tensor] | None = None  # hidden states of the current pass, if they are wanted

    def _compile(self) -> None:
        def forward(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return type(module).forward(module, *given, **named)

        self.compiled = self.compiler.compile(forward)
        self.around = forward if sum(p.numel() for p in self.model.parameters()) >= LARGE else self.compiled

    def __call__(self, **arguments: Any) -> Any:
        # transformers collects hidden states by hooks that dynamo cannot trace, and leaves them in the model.
        given = dict(arguments)
        wanted = len(self.parts.norms) == 1 and arguments.pop("output_hidden_states", False)

        def plain() -> Any:
            self.states = None
            return self.model(**given)

        out = self.compiler.run(lambda: self._pass(arguments, wanted), self._compile, plain)
        if self.states is not None:
            out.hidden_states, self.states = tuple(self.states), None
        return out

    def _pass(self, arguments: dict[str, Any], wanted: bool) -> Any:
        self.states = [] if wanted else None
        with self._on():
            return self.model(**arguments)

    def _on(self) -> AbstractContextManager[None]:
        parts = self.parts
        made = [(layer, self._layer(layer, index)) for index, layer in enumerate(parts.layers)]
        made += [(norm, self._norm(norm)) for norm in parts.norms]
        made += [(module, self._forward(module)) for module in parts.rotations]
        return replaced((module, "forward", forward) for module, forward in made)

    def _forward(self, module: nn.Module) -> Callable[..., Any]:
        return lambda *given, **named: self.around(module, given, named)

    def _layer(self, module: nn.Module, index: int) -> Callable[..., Any]:
        def part(value: Any) -> Any:
            return LayerCache(value.layers[index]) if isinstance(value, RaggedCache) else value

        def forward(*given: Any, **named: Any) -> Any:
            if self.states is not None:  # as in transformers: each layer's input, and the last norm's output
                self.states.append(given[0] if given else named["hidden_states"])
            return self.compiled(module, tuple(map(part, given)), {name: part(v) for name, v in named.items()})

        return forward

    def _norm(self, module: nn.Module) -> Callable[..., Any]:
        def forward(*given: Any, **named: Any) -> Any:
            out = self.around(module, given, named)
            if self.states is not None:
                self.states.append(out)
            return out

        return forward


def parts_of(model: nn.Module, count: int) -> Parts | None:
    """Find the parts of a model of `count` layers; None without such a list, or if a part's forward was replaced."""
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == count > 1:
                inside = {type(m) for layer in child for m in layer.modules()}
                norms = [m for m in parent.children() if type(m) in inside and m is not child]
                parts = Parts(list(child), norms, [m for m in parent.children() if _is_fixed_rotation(m)])
                return None if any("forward" in vars(m) for part in parts for m in part) else parts
    return None


def _is_fixed_rotation(module: nn.Module) -> bool:
    """True if a module computes rotations from positions alone; kinds that look at the longest cannot be traced."""
    kinds = getattr(module, "rope_type", None)
    kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
    return bool(kinds) and all(isinstance(k, str) and "dynamic" not in k and k != "longrope" for k in kinds)


def compiled_forward(
    model: Any,
    config: Any,
    mode: str,
    backend: str = "inductor",
    parts: bool = True,
    give_up: Callable[[str], None] | None = None,
) -> Forward:
    """Make what runs in the model's place in compiled passes. mode: "inductor" or "max" (graphs.MODES)."""
    compiler = Compiler(type(model).__name__, mode, backend, parts, give_up)
    found = parts_of(model, int(getattr(config, "num_hidden_layers", 0)))
    return CompiledFunction(model, compiler) if found is None else CompiledLayers(model, found, compiler)
