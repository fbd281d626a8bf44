"""specdec: speculative decoding for researchers, in pure PyTorch on Hugging Face models."""

import importlib
from typing import Any

from specdec import old_names
from specdec.config import UNSET, GenerationSettings, PairConfig, RunConfig
from specdec.decoder import SpeculativeDecoder
from specdec.decoding.acceptance import AcceptanceRule, register_rule
from specdec.decoding.result import Generation, Round
from specdec.decoding.timing import measure_costs
from specdec.drafters import (
    STRATEGIES,
    Draft,
    Drafter,
    DraftModel,
    DraftRequest,
    Eagle3,
    EarlyExit,
    LookupCache,
    NgramCache,
    NgramMapK,
    NgramMapK4V,
    NgramMod,
    NgramSimple,
    PromptLookup,
    Suffix,
    SuffixStore,
)
from specdec.drafters.costs import CostTable
from specdec.errors import SpecdecError
from specdec.models.fuse_projections import fuse_projections
from specdec.models.loading import LoadedPair, load_pair
from specdec.models.pair_report import PairReport
from specdec.stats import Stats
from specdec.version import __version__ as __version__

old_names.install()


def __getattr__(name: str) -> Any:
    """Modules by their old names, as attributes."""
    if name in old_names.MOVED:
        return importlib.import_module(f"specdec.{name}")
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")


__all__ = [
    "STRATEGIES", "UNSET", "AcceptanceRule", "CostTable", "Draft", "DraftModel", "DraftRequest", "Drafter",
    "Eagle3", "EarlyExit", "Generation", "GenerationSettings", "LoadedPair", "LookupCache", "NgramCache", "NgramMapK",
    "NgramMapK4V", "NgramMod", "NgramSimple", "PairConfig", "PairReport", "PromptLookup", "Round",
    "RunConfig", "SpecdecError", "SpeculativeDecoder", "Stats", "Suffix", "SuffixStore", "fuse_projections",
    "load_pair", "measure_costs", "register_rule",
]  # fmt: skip
