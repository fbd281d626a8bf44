"""A compiler pass that turns matrix products of a few rows into sums.

A matrix product of a row is a kernel that is mostly idle; sums of products become reductions that are fused with what
surrounds them. Several rows are as many sums over the same weights, which the compiler reads once for all.

This pays for small matrices only, whose kernels take as long to start as to run. A large one takes the time of reading
its weights, and a product reads them faster than a sum. Measured with all products as sums: a pass of one token took
0.74 of inductor's time where matrices had up to 1.8 million weights (135M parameters), 1.02 at 4 to 34 million (1B);
plain decoding took 1.36 of it at 5 to 101 million (6.4B). So the size of a matrix decides (`LARGEST`): a rule, and not
a trial, because another kernel is another text.

Plain and speculative decoding in exact mode have the same text either way: their passes have one width, above `ROWS`,
so no pass of the target has a sum, and those of a draft only decide about drafts.

Inductor can do the same, but only with its coordinate descent, whose trials of kernels take most of the compile time
and whose choices differ from process to process (docs/speed.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.node import map_arg

aten = torch.ops.aten

ROWS = 4  # two: what a pipelined draft catches up with; four: a level of a tree
LARGEST = 1 << 21  # weights of a matrix whose product is made a sum


class RowSums(CustomGraphPass):
    """Rewrites the compiler's graphs before it makes kernels: x [R, K] @ w [K, N] -> sums of x w over K, for R up to
    `ROWS` and K N up to `LARGEST`."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default):
                continue
            x, weight = node.args[-2:]
            value = x.meta["val"]
            small = value.shape[0] in range(1, ROWS + 1) and weight.meta["val"].numel() <= LARGEST
            if small and value.is_floating_point() and not node.kwargs:
                _replace(graph, node, x, weight)

    def uuid(self) -> Any:
        """Name the pass in the key of cached code."""
        return get_hash_for_files((__file__,))


def _replace(graph: fx.Graph, node: fx.Node, x: fx.Node, weight: fx.Node) -> None:
    def call(operation: Any, *given: Any) -> fx.Node:
        made = graph.call_function(operation, given)
        values = map_arg(given, lambda n: n.meta["val"])
        made.meta["val"] = operation(*values)
        return made

    def row_sums(row: fx.Node) -> fx.Node:
        products = call(aten.mul.Tensor, call(aten.unsqueeze.default, row, 2), call(aten.unsqueeze.default, weight, 0))
        return call(aten.sum.dim_IntList, products, [1])

    with graph.inserting_before(node):
        rows = x.meta["val"].shape[0]
        sums = [row_sums(x if rows == 1 else call(aten.slice.Tensor, x, 0, i, i + 1)) for i in range(rows)]
        out = sums[0] if rows == 1 else call(aten.cat.default, sums, 0)
        if node.target is aten.addmm.default:
            out = call(aten.add.Tensor, out, node.args[0])
    node.replace_all_uses_with(out)
    graph.erase_node(node)
