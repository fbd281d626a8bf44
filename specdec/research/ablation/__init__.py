"""Ablations: a grid of pairs, chains and settings, one row per prompt and setting, resumable and checked."""

from specdec.decoding.shard import Shard
from specdec.research.ablation.config import AblationConfig, Cell, load_ablation
from specdec.research.ablation.merge import merge
from specdec.research.ablation.runner import Session, run_ablation
from specdec.research.ablation.summary import summarise
from specdec.research.ablation.table import as_rows, build_table
from specdec.research.prompts.choice import DataConfig

__all__ = [
    "AblationConfig", "Cell", "DataConfig", "Session", "Shard", "as_rows", "build_table", "load_ablation", "merge",
    "run_ablation", "summarise",
]  # fmt: skip
