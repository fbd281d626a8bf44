"""specdec's own view of the caller's model, so that the caller's model is never touched.

A pass needs another attention function than the caller's, eval mode, and at times other `forward`s. All of these live
in the module objects and in the config that they share, where every other thread that runs the model would see a
change. So specdec runs a *view*: a copy of the module objects and of the configs. Parameters and buffers are the
caller's own tensors: the view takes no memory, and sees updates of weights in place at once.

What refers to the caller's modules is copied with them: bound methods, partials, closures, lists of modules (a patched
`forward`, hooks of accelerate). Hooks are called with the caller's own module, which they know. `ModelView.refresh`
compares the caller's model with what was copied and copies again after a change: a layer replaced, an adapter switched,
a `forward` patched, a hook added.

Not every reference can be followed: a function may name a module through a global variable. Then (and for modules that
cannot be copied) passes run on the caller's model itself, switched during a pass under a lock.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from specdec.errors import SpecdecError
from specdec.models.adapters import Chosen, switch
from specdec.models.attention import AttentionSwitch

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
NOT_FOLLOWED = (*PLAIN, Tensor, type, ModuleType, CodeType)
CONTAINERS = (list, tuple, set, frozenset, dict, deque)
DEPTH = 4  # references to modules are looked for this many objects deep
LARGEST = 1000  # containers of more entries hold data, not modules
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Their hooks keep what they need in the module that runs, or do not look at it.
LIBRARIES = ("torch", "transformers", "peft", "accelerate")

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


class ModelView:
    """A view of `original`.

    model: the view, in eval mode and with the attention function `implementation`
    private: `model` is a copy; else it is the original itself, which `attending` must switch
    prepare: changes the copy when it is made
    """

    def __init__(self, original: nn.Module, implementation: str, prepare: Callable[[nn.Module], Any] | None = None):
        self.original, self.implementation, self.prepare = original, implementation, prepare
        self.chosen: Chosen = None  # adapters
        self.builds = 0
        self.changes = 0  # builds that made earlier keys and values useless
        self._build()

    def _build(self) -> None:
        copier = _Copier()
        try:
            self.model: Any = copier.module(self.original)
            self.private = not copier.escaped
        except Exception:  # exotic modules may raise anything when their attributes are read or set
            self.private = False
        self.builds += 1
        self.seen = Snapshot(self.original, copier.originals() if self.private else list(self.original.modules()))
        if self.private:
            self.configs = [c for c in copier.configs if hasattr(c, "_attn_implementation_internal")]
            self._attend(self.implementation)
            if self.prepare is not None:
                self.prepare(self.model)
            if self.chosen is not None:
                switch(self.model, self.original, self.chosen)
        elif self.prepare is not None:
            raise SpecdecError(f"{type(self.original).__name__} cannot be copied, so no layer of it can be left out")
        else:
            self.model = self.original

    def choose(self, chosen: Chosen) -> bool:
        """Choose adapters for the passes that follow. Returns True if the choice is another."""
        if chosen == self.chosen:
            return False
        if not self.private:
            raise SpecdecError(f"{type(self.original).__name__} cannot be copied: set its adapter yourself")
        self.chosen = chosen
        switch(self.model, self.original, chosen)
        return True

    def renew(self) -> None:
        """Make the view anew."""
        self._build()

    def refresh(self) -> bool:
        """Follow changes of the original. Returns True if the view was made anew."""
        inside = self.seen.is_current_inside()
        if inside and self.seen.is_current_outside():
            return False
        self.changes += not inside
        self._build()
        return True

    @contextmanager
    def attending(self, implementation: str | None = None) -> Iterator[None]:
        """Prepare for a pass, with `implementation` if one is named; it must take the same masks."""
        wanted = implementation or self.implementation
        if not self.private:
            lock = _locks.setdefault(self.original, threading.RLock())
            with lock, AttentionSwitch(self.original, wanted).on():
                yield
            return
        before = self.configs[0]._attn_implementation_internal if self.configs else wanted
        if before == wanted:
            yield
            return
        self._attend(wanted)
        try:
            yield
        finally:
            self._attend(before)

    def _attend(self, implementation: str) -> None:
        # The private name: the public setter checks the name against every kernel that it knows.
        for config in self.configs:
            config._attn_implementation_internal = implementation


class _Copier:
    """Copies modules and what refers to them; all else is shared. escaped: a function names a module through a global,
    which no copy can follow."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}  # id of an original -> its copy
        self.kept: list[Any] = []  # the originals, so that no other object gets their ids meanwhile
        self.configs: list[Any] = []
        self.escaped = False

    def originals(self) -> list[nn.Module]:
        """List the modules that were copied."""
        return [value for value in self.kept if isinstance(value, nn.Module)]

    def _remember(self, original: Any, made: Any) -> Any:
        self.made[id(original)] = made
        self.kept.append(original)
        return made

    def module(self, original: nn.Module) -> Any:
        """Copy a module and all modules inside."""
        if id(original) in self.made:
            return self.made[id(original)]
        if isinstance(original, torch.jit.ScriptModule):  # compiled code, which asks no config for its attention
            return self._remember(original, original)
        if isinstance(original, OptimizedModule):
            return self._remember(original, self.module(original._orig_mod))
        made: Any = self._remember(original, object.__new__(type(original)))
        attributes = vars(made)
        for name, value in list(vars(original).items()):
            if name == "_parameters":
                attributes[name] = value
            elif name == "_modules":
                attributes[name] = {key: m if m is None else self.module(m) for key, m in value.items()}
            elif name in HOOKS:
                attributes[name] = type(value)((key, _hook(hook, original, made)) for key, hook in value.items())
            elif name == "_buffers" or (name.endswith("hooks") and isinstance(value, dict)):
                attributes[name] = type(value)(value)
            elif name == "_compiled_call_impl":  # of the original's own call
                attributes[name] = None
            else:
                attributes[name] = self.value(value)
        attributes["training"] = False
        return made

    def value(self, value: Any, depth: int = DEPTH) -> Any:
        """Return `value`, or a copy of it if it refers to modules."""
        if isinstance(value, NOT_FOLLOWED):
            return value
        if id(value) in self.made:
            return self.made[id(value)]
        if isinstance(value, nn.Module):
            return self.module(value)
        if depth == 0:
            return value
        if isinstance(value, CONTAINERS):
            return self._container(value, depth - 1)
        if isinstance(value, MethodType):
            function, owner = self.value(value.__func__, depth - 1), self.value(value.__self__, depth - 1)
            same = function is value.__func__ and owner is value.__self__
            return value if same else MethodType(function, owner)
        if isinstance(value, FunctionType):
            return self._function(value, depth - 1)
        if isinstance(value, functools.partial):
            return self._partial(value, depth - 1)
        return self._object(value, depth - 1) if hasattr(value, "__dict__") else value

    def _container(self, value: Any, depth: int) -> Any:
        if len(value) > LARGEST:
            return value
        items = list(value.values()) if isinstance(value, dict) else list(value)
        made = [self.value(item, depth) for item in items]
        if all(map(is_, items, made)):
            return value
        if isinstance(value, dict):
            copied = value.copy()
            copied.update(zip(value, made, strict=True))
            return self._remember(value, copied)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._remember(value, type(value)(*made))
        return self._remember(value, type(value)(made))

    def _partial(self, value: functools.partial[Any], depth: int) -> Any:
        parts = (value.func, value.args, value.keywords, vars(value))
        made = [self.value(part, depth) for part in parts]
        if all(map(is_, parts, made)):
            return value
        copied = functools.partial(made[0], *made[1], **made[2])
        vars(copied).update(made[3])
        return self._remember(value, copied)

    def _function(self, value: FunctionType, depth: int) -> Any:
        """Copy a function whose closure or default values refer to modules, with its own cells."""
        self._look_for_globals(value)
        self._remember(value, value)  # it may refer to itself
        cells = value.__closure__ or ()
        old = [content_of(cell) for cell in cells]
        parts = [*old, value.__defaults__, value.__kwdefaults__]
        made = [self.value(part, depth) for part in parts]
        if all(map(is_, parts, made)):
            return value
        # Cells that refer to no module stay shared, so that counters in them are the caller's own.
        own = tuple(c if a is b else CellType(b) for c, a, b in zip(cells, old, made[: len(old)], strict=True))
        copied = FunctionType(value.__code__, value.__globals__, value.__name__, made[-2], own)
        copied.__kwdefaults__ = made[-1]
        vars(copied).update(vars(value))
        self.made[id(value)] = copied
        return copied

    def _look_for_globals(self, function: FunctionType) -> None:
        for name in _names(function.__code__):
            found = function.__globals__.get(name)
            owner = getattr(found, "__self__", found) if not isinstance(found, (type, ModuleType)) else None
            self.escaped |= isinstance(owner, nn.Module)

    def _object(self, value: Any, depth: int) -> Any:
        self._remember(value, value)  # it may refer to itself
        attributes = vars(value)
        if hasattr(value, "_attn_implementation_internal"):  # a config
            copied = object.__new__(type(value))
            self.made[id(value)] = copied
            self.configs.append(copied)
            vars(copied).update({name: self.value(v, DEPTH) for name, v in attributes.items()})
            return copied
        made = {name: self.value(v, depth) for name, v in attributes.items()}
        if all(map(is_, attributes.values(), made.values())):
            return value
        copied = object.__new__(type(value))
        vars(copied).update(made)
        self.made[id(value)] = copied
        return copied


class _CallersHook:
    """Calls a hook with the caller's module, and copies what it sets there."""

    def __init__(self, hook: Callable[..., Any], original: nn.Module, copy: nn.Module):
        self.hook, self.original, self.copy = hook, original, copy

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        before = dict(vars(self.original))
        result = self.hook(self.original, *given)
        for name, value in vars(self.original).items():
            if before.get(name, before) is not value and name != "training":
                vars(self.copy)[name] = value
        return result


def _hook(hook: Any, original: nn.Module, copy: nn.Module) -> Any:
    origin = getattr(hook, "__module__", None) or ""
    return hook if origin.split(".")[0] in LIBRARIES else _CallersHook(hook, original, copy)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names that code may read, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def content_of(cell: CellType) -> Any:
    """Return what a closure's cell holds."""
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


class Snapshot:
    """Modules when they were copied: attributes, children, buffers, hooks, code of their classes, values of configs.

    watched: what hangs on them and can change in place (models/state.py)
    Hooks of the model itself are kept apart (`outside`): they count passes, and see nothing of what is inside.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module]):
        self.outside = [(d, dict(d)) for name, d in vars(model).items() if name.startswith(HOOKS)]
        outside = {id(d) for d, _ in self.outside}
        dicts = [d for m in modules for d in (vars(m), *_own_dicts(m)) if id(d) not in outside]
        # A model of some hundred modules has some thousand dicts, most of them empty: hooks.
        self.empty = [d for d in dicts if not d]
        self.filled = [d for d in dicts if d]
        self.before = [dict(d) for d in self.filled]
        self.values = [v for d in self.filled for v in d.values()]
        self.modules, self.kinds = modules, [type(m) for m in modules]
        hanging = [(name, v) for m in modules for name, v in vars(m).items() if id(v) not in outside]
        self.watched = [v for name, v in hanging if _can_change(name, v)]
        self.code = {kind: kind.forward for kind in set(self.kinds)}
        values = {id(v): v for m in modules for v in vars(m).values() if not isinstance(v, NOT_FOLLOWED)}
        self.configs = [(v, contents(v)) for v in values.values() if hasattr(v, "_attn_implementation_internal")]
        self.lists = [
            (v, [id(e) for e in _entries(v)])
            for v in values.values()
            if isinstance(v, CONTAINERS) and any(isinstance(e, nn.Module) for e in _entries(v))
        ]

    def is_current_outside(self) -> bool:
        """True if the model itself has the same hooks."""
        return all(map(_is_same, *zip(*self.outside, strict=True)))

    def is_current_inside(self) -> bool:
        """True if nothing else has changed."""
        return (
            not any(self.empty)
            and all(map(is_, map(type, self.modules), self.kinds))
            and (self._is_identical() or all(map(_is_same, self.filled, self.before)))
            and all(kind.forward is forward for kind, forward in self.code.items())
            and all(contents(config) == before for config, before in self.configs)
            and all([id(e) for e in _entries(v)] == before for v, before in self.lists)
        )

    def _is_identical(self) -> bool:
        now = list(chain.from_iterable(map(dict.values, self.filled)))
        return len(now) == len(self.values) and all(map(is_, now, self.values))


def _can_change(name: str, value: Any) -> bool:
    if name in HOOKS or isinstance(value, Tensor):
        return bool(name not in HOOKS or value)
    own = name in ("_parameters", "_buffers", "_modules") or name.endswith(("_hooks", "_buffers_set"))
    if own or isinstance(value, (*NOT_FOLLOWED, nn.Module)) or (isinstance(value, CONTAINERS) and not len(value)):
        return False
    return not hasattr(value, "_attn_implementation_internal")  # configs are compared when the view is refreshed


def _own_dicts(module: nn.Module) -> list[dict[Any, Any]]:
    """List the dicts of a module's children, buffers and hooks."""
    return [d for name, d in vars(module).items() if name[0] == "_" and isinstance(d, dict) and name != "_parameters"]


def _is_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """True if a dict has the same entries. The caller may train the model between calls; the view is never trained."""
    return len(now) == len(before) and all(now.get(k, now) is v for k, v in before.items() if k != "training")


def _entries(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def contents(value: Any, depth: int = DEPTH) -> Any:
    """Return a value in a form that can be compared: containers and objects by their contents, others by identity."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict) and depth:
        return tuple((key, contents(v, depth - 1)) for key, v in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, CONTAINERS) and depth:
        return tuple(contents(v, depth - 1) for v in value)
    if hasattr(value, "__dict__") and depth and not isinstance(value, (*NOT_FOLLOWED, nn.Module, FunctionType)):
        return tuple((name, contents(v, depth - 1)) for name, v in vars(value).items())
    return id(value)
