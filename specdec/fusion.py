"""Projections of one input as one product: q, k and v of an attention, gate and up of a gated MLP.

At a few tokens a pass a projection is limited by how fast its weight is read, and small matrices are read at a
fraction of the memory's bandwidth. The weights of a group become views of one matrix, so that nothing is copied and
`state_dict`, in-place updates and hooks work as before; the first module of a group computes the product, the others
hand out their parts of it.

The numbers may differ in the last bits from those of separate products. Both plain and speculative decoding see the
same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_projections(model: nn.Module) -> int:
    """Fuse what can be fused in `model`, in place; returns how many groups were. Move the model before: a group whose
    weights are replaced afterwards falls back to separate products."""
    groups = list(_groups(model))
    for layers in groups:
        product = _Product(layers)
        for i, layer in enumerate(layers):
            vars(layer)["forward"] = partial(product.part, i)
    return len(groups)


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for module in model.modules():
        for names in GROUPS:
            layers = [getattr(module, name, None) for name in names]
            # Adapters, quantised layers and layers that are fused already are left alone.
            plain = [layer for layer in layers if type(layer) is nn.Linear and "forward" not in vars(layer)]
            if len(plain) == len(names) and _alike(plain):
                yield plain


def _alike(layers: list[nn.Linear]) -> bool:
    kinds = {(w.in_features, w.weight.dtype, w.weight.device, w.bias is None) for w in layers}
    return len(kinds) == 1 and not any(w.weight.is_meta for w in layers)


class _Product:
    """The product of one group. It keeps its parts from the first module's call to the last one's."""

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        with torch.no_grad():
            self.weight = torch.cat([layer.weight for layer in layers])
            self.bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
            for layer, weight in zip(layers, self.weight.split(self.sizes), strict=True):
                layer.weight.data = weight
            if self.bias is not None:
                for layer, bias in zip(layers, self.bias.split(self.sizes), strict=True):
                    layer.bias.data = bias
        self.given: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def part(self, i: int, x: Tensor) -> Tensor:
        """What module i makes of x [..., in]."""
        layer = self.layers[i]
        if torch.is_grad_enabled() or not self._whole():  # gradients belong to the layers' own parameters
            return F.linear(x, layer.weight, layer.bias)
        if self.given is not x:
            self.given, self.parts = x, F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
        found = self.parts[i]
        if i + 1 == len(self.layers):
            self.given, self.parts = None, ()
        return found

    def _whole(self) -> bool:
        """Whether the layers' weights still are parts of this product's."""
        if torch.compiler.is_compiling():  # graphs know the addresses: they are dropped when weights have moved
            return True
        ends = [self.layers[0].weight.data_ptr(), self.layers[-1].weight.data_ptr()]
        last = self.weight[-self.sizes[-1] :]
        return ends == [self.weight.data_ptr(), last.data_ptr()]
