"""Who is measured: specdec, transformers, and classes of one's own, `my_module:MyContender`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import SpecdecError
from specdec.files.own_code import find_object
from specdec.research.bench.contenders.base import Contender, Output
from specdec.research.bench.contenders.hf import Transformers
from specdec.research.bench.contenders.own import Own

KINDS: dict[str, type[Contender]] = {made.kind: made for made in (Own, Transformers)}


def make_contender(name: str, options: Mapping[str, Any]) -> Contender:
    """A contender from its options in the config. Raises SpecdecError for an unknown kind or option."""
    kind = str(options.get("kind"))
    made = KINDS[kind] if kind in KINDS else find_object(kind, sorted(KINDS), "kind of contender")
    if not (isinstance(made, type) and issubclass(made, Contender)):
        raise SpecdecError(f"contender {name!r}: {kind} is no subclass of Contender")
    return made(name, options)


__all__ = ["KINDS", "Contender", "Output", "Own", "make_contender"]
