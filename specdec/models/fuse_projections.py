"""Projections of one input as one product: q, k and v of an attention, gate and up of a gated MLP.

At a few tokens per pass a projection is limited by how fast its weight is read, and small matrices are read at a
fraction of the memory's bandwidth. The weights of a group become views of one matrix, so that nothing is copied and
`state_dict`, in-place updates and hooks work as before; the first module of a group computes the product, the others
return their parts of it.

Of weights that are spread over processes (models/tensor_parallel.py) those parts are joined that a process holds.

The numbers may differ in the last bits from those of separate products; plain and speculative decoding see the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.models.tensor_parallel import Columns, own_part

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Fusion:
    """The groups of a model that can be fused; their weights become views of one matrix.

    Products are computed as one inside `on()`, or after `install()`. Move the model before: a group whose weights are
    replaced later falls back to separate products.
    """

    def __init__(self, model: nn.Module):
        self.products = [_Product(layers) for layers in _groups(model)]

    def __len__(self) -> int:
        return len(self.products)

    @property
    def is_whole(self) -> bool:
        """True while all weights are views of their products': none was replaced."""
        return all(product.is_whole() for product in self.products)

    def install(self) -> None:
        """Fuse until `remove()`."""
        for product in self.products:
            for i, layer in enumerate(product.layers):
                # A class, not a function per module: compiled code of one layer serves them all.
                layer.__class__ = _Part
                vars(layer).update(product=product, part=i)

    def remove(self) -> None:
        """Make the layers plain again."""
        for product in self.products:
            for layer in product.layers:
                layer.__class__ = product.kind
                for name in ("product", "part"):
                    vars(layer).pop(name, None)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Fuse inside the block."""
        self.install()
        try:
            yield
        finally:
            self.remove()


def fuse_projections(model: nn.Module) -> int:
    """Fuse what can be fused in `model`, in place; returns the number of fused groups."""
    fusion = Fusion(model)
    fusion.install()
    return len(fusion)


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for module in model.modules():
        for names in GROUPS:
            layers = [getattr(module, name, None) for name in names]
            # Adapters, quantised layers and layers that are fused already are left alone.
            plain = [layer for layer in layers if isinstance(layer, nn.Linear) and _is_plain(layer)]
            if len(plain) == len(names) and _alike(plain):
                yield plain


def _is_plain(layer: nn.Linear) -> bool:
    own = type(layer.weight) is nn.Parameter if type(layer) is nn.Linear else type(layer) is Columns
    return own and "forward" not in vars(layer)


def _alike(layers: list[nn.Linear]) -> bool:
    kinds = {(type(w), w.in_features, w.weight.dtype, w.weight.device, w.bias is None) for w in layers}
    return len(kinds) == 1 and not any(w.weight.is_meta for w in layers)


class _Part(nn.Linear):
    """A module of a fused group; `product` and `part` are set on the instance."""

    product: _Product
    part: int

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.part, x)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """Join parameters into one tensor, of which they become views; without a copy if they are already."""
    first, sizes = parameters[0], [len(p) for p in parameters]
    starts = [first.data_ptr() + n * first.stride(0) * first.element_size() for n in (0, *_sums(sizes[:-1]))]
    whole = (sum(sizes), *first.shape[1:])
    adjacent = [p.data_ptr() for p in parameters] == starts and all(p.is_contiguous() for p in parameters)
    if adjacent and len({p.untyped_storage().data_ptr() for p in parameters}) == 1:
        return first.detach().as_strided(whole, first.stride(), first.storage_offset())
    with torch.no_grad():
        joined = torch.cat(list(parameters))
        for parameter, view in zip(parameters, joined.split(sizes), strict=True):
            parameter.data = view
    return joined


def _sums(sizes: list[int]) -> list[int]:
    return [sum(sizes[: i + 1]) for i in range(len(sizes))]


class _Product:
    """The product of one group. It keeps its parts from the first module's call to the last one's."""

    def __init__(self, layers: list[nn.Linear]):
        self.layers, self.kind = layers, type(layers[0])
        with torch.no_grad():  # of a spread weight this process's part itself, not a view of it
            weights, biases = ([own_part(getattr(w, name)) for w in layers] for name in ("weight", "bias"))
        self.sizes = [len(weight) for weight in weights]
        self.weight = _joined(weights)
        self.bias = None if biases[0] is None else _joined(biases)
        self.given: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def __call__(self, i: int, x: Tensor) -> Tensor:
        """Compute module i of x [..., in]."""
        layer = self.layers[i]
        if torch.is_grad_enabled() or not self.is_whole():  # gradients belong to the layers' own parameters
            return F.linear(x, own_part(layer.weight), own_part(layer.bias))
        if self.given is not x:
            self.given, self.parts = x, F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
        found = self.parts[i]
        if i + 1 == len(self.layers):
            self.given, self.parts = None, ()
        return found

    def is_whole(self) -> bool:
        """True if the layers' weights are still views of this product's."""
        if torch.compiler.is_compiling():  # graphs know the addresses: they are dropped when weights have moved
            return True
        ends = [own_part(self.layers[i].weight).data_ptr() for i in (0, -1)]
        last = self.weight[-self.sizes[-1] :]
        return ends == [self.weight.data_ptr(), last.data_ptr()]
