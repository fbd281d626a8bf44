"""Who is measured: specdec, transformers, and other implementations that are installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.config import unknown_name
from specdec.research.bench.contenders.base import Contender, Output
from specdec.research.bench.contenders.economize import Economize
from specdec.research.bench.contenders.flashspec import Flashspec
from specdec.research.bench.contenders.hf import Transformers
from specdec.research.bench.contenders.own import Own

KINDS: dict[str, type[Contender]] = {made.kind: made for made in (Own, Transformers, Economize, Flashspec)}


def make_contender(name: str, options: Mapping[str, Any]) -> Contender:
    """A contender from its options in the config. Raises SpecdecError for an unknown kind or option."""
    kind = str(options.get("kind"))
    if kind not in KINDS:
        raise unknown_name("kind of contender", kind, sorted(KINDS))
    return KINDS[kind](name, options)


__all__ = ["KINDS", "Contender", "Output", "Own", "make_contender"]
