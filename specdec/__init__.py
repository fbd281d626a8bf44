"""specdec: speculative decoding for researchers, in pure PyTorch on Hugging Face models."""

from specdec.acceptance import AcceptanceRule, register_rule
from specdec.config import UNSET, GenerationSettings, PairConfig, RunConfig
from specdec.costs import CostTable
from specdec.decoder import SpeculativeDecoder
from specdec.drafters import (
    STRATEGIES,
    Draft,
    Drafter,
    DraftModel,
    DraftRequest,
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
from specdec.errors import SpecdecError
from specdec.fusion import fuse_projections
from specdec.loading import LoadedPair, load_pair
from specdec.report import PairReport
from specdec.result import Generation, Round
from specdec.stats import Stats
from specdec.timing import measure_costs
from specdec.version import __version__ as __version__

__all__ = [
    "STRATEGIES", "UNSET", "AcceptanceRule", "CostTable", "Draft", "DraftModel", "DraftRequest", "Drafter",
    "Generation", "GenerationSettings", "LoadedPair", "LookupCache", "NgramCache", "NgramMapK",
    "NgramMapK4V", "NgramMod", "NgramSimple", "PairConfig", "PairReport", "PromptLookup", "Round",
    "RunConfig", "SpecdecError", "SpeculativeDecoder", "Stats", "Suffix", "SuffixStore", "fuse_projections",
    "load_pair", "measure_costs", "register_rule",
]  # fmt: skip
