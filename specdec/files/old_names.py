"""Module names of version 0.1.0 that have moved: they can be imported for one release more."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "acceptance": "decoding.acceptance",
    "attention": "models.attention",
    "buffers": "device.buffers",
    "call": "decoding.call",
    "checks": "decoding.validation",
    "compiled": "models.compile_layers",
    "constraints": "sampling.constraints",
    "contract": "sampling.processor_check",
    "costs": "drafters.costs",
    "details": "decoding.probe",
    "drafters.draft_ahead": "drafters.draft_model.pipelined",
    "drafters.draft_core": "drafters.draft_model.core",
    "drafters.draft_tree": "drafters.draft_model.tree",
    "drafters.lookup_cache": "drafters.ngram.lookup_cache",
    "drafters.ngram_cache": "drafters.ngram.cache",
    "drafters.ngram_core": "drafters.ngram.hashing",
    "drafters.ngram_map": "drafters.ngram.map",
    "drafters.ngram_mod": "drafters.ngram.mod",
    "drafters.ngram_simple": "drafters.ngram.simple",
    "drafters.translation": "drafters.draft_model.translation",
    "engine": "decoding.engine",
    "fusion": "models.fuse_projections",
    "graphs": "device.graphs",
    "kv_cache": "models.kv_cache",
    "loading": "models.loading",
    "prefixes": "sampling.prefixes",
    "processors": "sampling.processors",
    "prompts": "decoding.prompts",
    "provenance": "decoding.provenance",
    "reader": "device.host_read",
    "report": "models.pair_report",
    "research.analysis": "research.traces.analysis",
    "research.compare": "research.ablation.compare",
    "research.datasets": "research.prompts.datasets",
    "research.equality": "research.exactness.equality",
    "research.exactness_summary": "research.exactness.summary",
    "research.forcing": "research.offline.forcing",
    "research.inflate": "research.models.inflate",
    "research.lookup": "research.offline.lookup",
    "research.monitor": "research.traces.monitor",
    "research.plot_table": "research.ablation.look",
    "research.plots": "research.ablation.plots",
    "research.prompt_sources": "research.prompts.sources",
    "research.replay": "research.offline.replay",
    "research.smollm2": "research.models.smollm2",
    "research.synthetic": "research.models.synthetic",
    "research.token_page": "research.traces.token_page",
    "research.trace": "research.traces.trace",
    "research.trace_files": "research.traces.trace_files",
    "research.what_if": "research.offline.what_if",
    "result": "decoding.result",
    "row_sums": "models.small_matmul_pass",
    "rows": "decoding.row",
    "runner": "models.runner",
    "texts": "files.texts",
    "trees": "models.trees",
    "verification": "decoding.verification",
}


class OldNames(MetaPathFinder, Loader):
    """Finds the modules of MOVED under their old names; an old name is the same module object as the new one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.removeprefix("specdec.") in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = f"specdec.{MOVED[old.removeprefix('specdec.')]}"
        warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def install() -> None:
    """Make the old names importable."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())
