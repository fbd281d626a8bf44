"""Products of one row as sums, for the compiler: a matrix product of one row is a kernel of its own that is mostly
idle, sums of products become reductions that are fused with what surrounds them.

Inductor does the same by itself, but only together with its coordinate descent, whose trials of kernels take most of
the compile time and whose choices differ from process to process (docs/speed.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten = torch.ops.aten


class RowSums(CustomGraphPass):
    """A pass over the compiler's graphs, before it makes kernels: x [1, K] @ w [K, N] -> sums of x w over K."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default):
                continue
            x, weight = node.args[-2:]
            value = x.meta["val"]
            if value.shape[0] == 1 and value.is_floating_point() and not node.kwargs:
                _replace(graph, node, x, weight)

    def uuid(self) -> Any:
        """Names the pass in the key of cached code."""
        return get_hash_for_files((__file__,))


def _replace(graph: fx.Graph, node: fx.Node, x: fx.Node, weight: fx.Node) -> None:
    def call(operation: Any, *given: Any) -> fx.Node:
        made = graph.call_function(operation, given)
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in given]
        made.meta["val"] = operation(*values)
        return made

    with graph.inserting_before(node):
        products = call(aten.mul.Tensor, call(aten.unsqueeze.default, x, 2), call(aten.unsqueeze.default, weight, 0))
        out = call(aten.sum.dim_IntList, products, [1])
        if node.target is aten.addmm.default:
            out = call(aten.add.Tensor, out, node.args[0])
    node.replace_all_uses_with(out)
    graph.erase_node(node)
