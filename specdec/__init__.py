"""specdec: speculative decoding for researchers, in pure PyTorch on Hugging Face models.

Names are imported when they are first used: `specdec --help` and `specdec.theory` need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from specdec.files import old_names
from specdec.version import __version__ as __version__

if TYPE_CHECKING:
    from specdec.config import UNSET, GenerationSettings, PairConfig, RunConfig
    from specdec.decoder import SpeculativeDecoder
    from specdec.decoding.acceptance import AcceptanceRule, register_rule
    from specdec.decoding.result import Generation, GenerationRow, Round
    from specdec.decoding.timing import measure_costs
    from specdec.drafters import (
        STRATEGIES,
        DFlash,
        Draft,
        Drafter,
        DraftModel,
        DraftRequest,
        Eagle3,
        EarlyExit,
        Lookahead,
        LookupCache,
        Mtp,
        NgramCache,
        NgramMapK,
        NgramMapK4V,
        NgramMod,
        NgramSimple,
        PromptLookup,
        Rest,
        Suffix,
        SuffixStore,
        TokenRecycling,
    )
    from specdec.drafters.costs import CostTable
    from specdec.drafters.policies import LengthPolicy
    from specdec.errors import SpecdecError
    from specdec.models.fuse_projections import fuse_projections
    from specdec.models.loading import LoadedPair, load_pair
    from specdec.models.pair_report import PairReport
    from specdec.research.results import Results
    from specdec.stats import Stats

__all__ = [
    "STRATEGIES", "UNSET", "AcceptanceRule", "CostTable", "DFlash", "Draft", "DraftModel", "DraftRequest", "Drafter",
    "Eagle3", "EarlyExit", "Generation", "GenerationRow", "GenerationSettings", "LengthPolicy", "LoadedPair",
    "Lookahead", "LookupCache", "Mtp", "NgramCache", "NgramMapK", "NgramMapK4V", "NgramMod", "NgramSimple",
    "PairConfig", "PairReport", "PromptLookup", "Rest", "Results", "Round", "RunConfig", "SpecdecError",
    "SpeculativeDecoder", "Stats", "Suffix", "SuffixStore", "TokenRecycling", "fuse_projections", "load_pair",
    "measure_costs", "register_rule",
]  # fmt: skip

_HOMES = {
    "config": ("UNSET", "GenerationSettings", "PairConfig", "RunConfig"),
    "decoder": ("SpeculativeDecoder",),
    "decoding.acceptance": ("AcceptanceRule", "register_rule"),
    "decoding.result": ("Generation", "GenerationRow", "Round"),
    "decoding.timing": ("measure_costs",),
    "drafters.costs": ("CostTable",),
    "drafters.policies": ("LengthPolicy",),
    "errors": ("SpecdecError",),
    "models.fuse_projections": ("fuse_projections",),
    "models.loading": ("LoadedPair", "load_pair"),
    "models.pair_report": ("PairReport",),
    "research.results": ("Results",),
    "stats": ("Stats",),
}  # all others: drafters
_HOME = {name: home for home, names in _HOMES.items() for name in names}

old_names.install()


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package, also by its old name."""
    if name in __all__:
        value = getattr(importlib.import_module(f"specdec.{_HOME.get(name, 'drafters')}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"specdec.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"specdec.{name}":
                raise
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
