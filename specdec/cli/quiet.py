"""Libraries' warnings and loading bars, kept off the screen while a verb runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, partialmethod
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from rich.console import Console

from specdec.errors import SettingWarning

LOGGING = "transformers.utils.logging"


def warn(message: str) -> None:
    """A line on standard error that is no failure."""
    Console(stderr=True, highlight=False).print(f"warning: {message}", style="yellow", markup=False, soft_wrap=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' warnings and loading bars off the screen; bars of downloads stay on a terminal."""
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", SettingWarning)
        warnings.showwarning = lambda message, *where: warn(str(message))
        silence = partial(stack.enter_context, _quiet_libraries())
        if LOGGING in sys.modules:
            silence()
        else:  # a wrong call must not wait for transformers to be imported
            stack.enter_context(_once_imported(LOGGING, silence))
        yield


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    from huggingface_hub.utils import enable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from tqdm.auto import tqdm
    from transformers.utils import logging as transformers_logging

    from specdec.models.bars import without_bars

    bar: Any = tqdm  # of transformers' GGUF reader, which asks nobody
    begin = bar.__init__
    loggers = (transformers_logging, hub_logging)
    levels = [log.get_verbosity() for log in loggers]
    with without_bars():
        for log in loggers:
            log.set_verbosity_error()
        if sys.stderr.isatty():
            enable_progress_bars()
        else:
            bar.__init__ = partialmethod(begin, disable=True)
        try:
            yield
        finally:
            bar.__init__ = begin
            for log, level in zip(loggers, levels, strict=True):
                log.set_verbosity(level)


class _AtImport(MetaPathFinder):
    """Calls `then` as soon as the module `name` has been imported."""

    def __init__(self, name: str, then: Callable[[], Any]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            self.then()

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


@contextmanager
def _once_imported(name: str, then: Callable[[], Any]) -> Iterator[None]:
    finder = _AtImport(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with suppress(ValueError):  # it was imported
            sys.meta_path.remove(finder)
