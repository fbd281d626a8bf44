"""EAGLE heads: their forward pass over the library's cache, their files, and EAGLE-2's dynamic tree."""

from specdec.drafters.best_tree import Tree, TreeSize, grow
from specdec.drafters.eagle3.config import HeadConfig
from specdec.drafters.eagle3.dynamic_tree import TreePasses
from specdec.drafters.eagle3.export import export
from specdec.drafters.eagle3.formats import LAYOUTS, LoadedHead, load_head
from specdec.drafters.eagle3.head import EagleHead

__all__ = [
    "LAYOUTS",
    "EagleHead",
    "HeadConfig",
    "LoadedHead",
    "Tree",
    "TreePasses",
    "TreeSize",
    "export",
    "grow",
    "load_head",
]
