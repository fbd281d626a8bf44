"""Projections through oneDNN: the same numbers and texts, bits that do not depend on the other rows, and only where
they are faster."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from torch import nn

from specdec import SpeculativeDecoder
from specdec.drafters.costs import nominal_costs
from specdec.models import cpu_products
from specdec.models import runner as runner_module
from specdec.models.cpu_products import LARGE, OneDnnLinear, use_onednn
from specdec.models.runner import Runner
from tests.helpers.tiny import tiny_model

X86 = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
pytestmark = pytest.mark.skipif(not X86, reason="needs an x86 CPU and a torch with oneDNN")

SIDE = 512  # SIDE * SIDE is LARGE
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7]]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests are small, and every x86 has these products."""
    monkeypatch.setattr(cpu_products, "CACHED", 0)
    monkeypatch.setattr(cpu_products, "is_for_this_machine", lambda: True)


def wide_model(seed: int = 0) -> nn.Module:
    return tiny_model("llama", seed, hidden_size=SIDE, intermediate_size=SIDE, initializer_range=0.05)


def product(rows: int, bias: bool, seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A projection, its input and what torch makes of it."""
    torch.manual_seed(seed)
    holder = nn.Sequential(nn.Linear(SIDE, SIDE + 24, bias=bias))
    x = torch.randn(2, rows, SIDE)
    with torch.no_grad():
        return holder, x, holder(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64])
def test_the_numbers_are_those_of_torch(rows: int, bias: bool) -> None:
    holder, x, wanted = product(rows, bias)
    assert use_onednn(holder) == 1
    assert use_onednn(holder) == 0  # it is already
    with torch.no_grad():
        torch.testing.assert_close(holder(x), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(holder(x.transpose(0, 1)), wanted.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_bits_depend_neither_on_the_other_rows_nor_on_their_order_nor_on_how_many_they_are() -> None:
    holder, _, _ = product(1, bias=False)
    use_onednn(holder)
    x = torch.randn(17, SIDE)
    with torch.no_grad():
        whole, order = holder(x), torch.randperm(17)
        assert torch.equal(holder(x[order]), whole[order])
        for count in (2, 3, 8):
            assert torch.equal(holder(x[:count]), whole[:count])


def test_gradients_and_weights_that_are_replaced_are_torchs() -> None:
    holder, x, wanted = product(3, bias=True)
    use_onednn(holder)
    holder(x).sum().backward()
    assert holder[0].weight.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(holder.double()(x.double()).float(), wanted, atol=1e-5, rtol=1e-5)


def test_small_projections_other_types_and_patched_ones_stay() -> None:
    class Own(nn.Linear):
        pass

    patched = nn.Linear(SIDE, SIDE)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    kept = [
        nn.Linear(SIDE, LARGE // SIDE - 1),
        nn.Linear(SIDE, SIDE, dtype=torch.float64),
        nn.Linear(SIDE, SIDE, dtype=torch.bfloat16),
        nn.Linear(SIDE, SIDE, device="meta"),
        Own(SIDE, SIDE),
        patched,
    ]
    assert use_onednn(nn.ModuleList(kept)) == 0


def test_models_that_a_cache_may_hold_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "CACHED", SIDE * SIDE + SIDE + 1)
    assert use_onednn(nn.Sequential(nn.Linear(SIDE, SIDE))) == 0
    assert use_onednn(nn.Sequential(nn.Linear(SIDE, SIDE + 1))) == 1


def test_texts_are_the_same_and_the_callers_model_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = wide_model(), wide_model()
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.002 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    options = {"max_new_tokens": 24, "ignore_eos": True}
    decoder = SpeculativeDecoder(target, draft)
    assert decoder.target.onednn > 0
    made = [decoder.generate(PROMPTS, strategies=chain, **options) for chain in ([], ["draft-model:n_max=3"])]
    assert not any(isinstance(m, OneDnnLinear) for m in target.modules())
    monkeypatch.setattr(runner_module, "use_onednn", lambda _: 0)
    apart = SpeculativeDecoder(target, draft).generate(PROMPTS, strategies=[], **options)
    assert made[0].token_ids == made[1].token_ids == apart.token_ids
    assert made[1].stats.accepted_tokens > 0


def test_exact_mode_holds() -> None:
    decoder = SpeculativeDecoder(wide_model(), wide_model(1), exact=True)
    options = {"max_new_tokens": 24, "ignore_eos": True, "output_logprobs": True}
    plain = decoder.generate(PROMPTS, strategies=[], **options)
    drafted = decoder.generate(PROMPTS, strategies=["draft-model:n_max=5", "prompt-lookup"], **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs  # to the last bit


def test_nominal_costs_know_it() -> None:
    def of(model: nn.Module) -> list[float]:
        found = nominal_costs(Runner(model))
        return [found.seconds("target", 1, 64, width) for width in (3, 4, 5)]

    three, four, five = of(wide_model())
    assert five - four == pytest.approx(four - three)  # no second reading of the weights from four tokens on
    three, four, five = of(tiny_model("llama"))
    assert four - three > 1.5 * (five - four)


@pytest.mark.parametrize(("maker", "wanted"), [("GenuineIntel", False), ("AuthenticAMD", True)])
def test_an_intel_processor_keeps_its_own_library(maker: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: f"processor : 0\nvendor_id : {maker}\n")
    assert cpu_products.is_for_this_machine.__wrapped__() == wanted
