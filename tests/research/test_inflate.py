"""Inflated models say what the small ones say, and coarsened ones something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec
from specdec.errors import SpecdecError
from specdec.research.models.inflate import PRESETS, SUPPORTED, Inflation, coarsen, inflate
from tests.helpers.eagle3 import random_head
from tests.helpers.scripts import load_script
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

IDS = torch.arange(3, 123).reshape(3, 40)
GROWN: dict[str, Any] = {"hidden_size": 72, "layers": 5, "intermediate_size": 150}
EPS = 0.05  # large enough for a wrong epsilon to be seen


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


def worst(model: Any, other: Any) -> float:
    """Largest difference of the logits, relative to the largest logit."""
    mine, theirs = logits(model), logits(other)
    return float((mine - theirs).abs().max() / mine.abs().max())


@pytest.fixture
def double_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's RMSNorm computes in float32 whatever the model's dtype; here it computes in float64."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_the_inflated_model_has_the_same_logits(kind: str, tied: bool) -> None:
    """In float32, to 1e-5 of the largest logit: sums of other lengths."""
    model = tiny_model(kind, tie_word_embeddings=tied, rms_norm_eps=EPS)
    assert worst(model, inflate(model, **GROWN)) < 1e-5


@pytest.mark.parametrize(
    "grown", [{"hidden_size": 72}, {"layers": 6}, {"intermediate_size": 65}, {"kv_heads": 5}, GROWN], ids=str
)
def test_every_way_of_growing_is_exact_in_float64(grown: dict[str, Any], double_norms: None) -> None:
    biased = {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": EPS}
    model = tiny_model("llama", **biased).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                p.add_(torch.linspace(-0.3, 0.3, p.numel()))
    assert worst(model, inflate(model, **grown)) < 1e-12


@pytest.mark.parametrize("fault", ["epsilon", "norm", "o_proj", "embedding", "head"])
def test_a_wrong_inflation_is_noticed(fault: str, double_norms: None) -> None:
    """Each rule of the construction matters to the comparison above."""
    model = tiny_model("llama", rms_norm_eps=EPS).double()
    big = inflate(model, **GROWN)
    with torch.no_grad():
        if fault == "epsilon":
            for module in big.modules():
                if hasattr(module, "variance_epsilon"):
                    module.variance_epsilon = EPS
        elif fault == "norm":
            big.model.norm.weight.mul_(1.001)
        elif fault == "o_proj":
            big.model.layers[-1].self_attn.o_proj.weight.add_(1e-3)
        elif fault == "embedding":
            big.model.embed_tokens.weight[:, 1] = 0.01
        else:
            big.model.layers[0].self_attn.q_proj.weight.copy_(big.model.layers[0].self_attn.q_proj.weight.flip(0))
    assert worst(model, big) > 1e-6


def test_the_shapes_are_those_asked_for_and_nothing_is_left_zero_but_the_ways_into_the_stream() -> None:
    model = tiny_model("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    big = inflate(model, **GROWN)
    c = big.config
    assert (c.hidden_size, c.num_hidden_layers, c.intermediate_size) == (72, 5, 150)
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (8, 4, 8)
    assert big.model.layers[4].mlp.gate_proj.weight.shape == (150, 72)
    for name, p in big.named_parameters():
        zero = float((p == 0).float().mean())
        assert (zero > 0.3) == name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")), name
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.config.hidden_size == 32


def test_it_decodes_to_the_small_models_text() -> None:
    model = tiny_model("mistral")
    decoder = specdec.SpeculativeDecoder(inflate(model, **GROWN), coarsen(model, 0.2))
    out = decoder.generate([[5, 6, 7]], max_new_tokens=20, strategies=[specdec.DraftModel(n_max=4)])
    assert out.token_ids[0] == oracle_greedy(model, [5, 6, 7], 20)
    assert 0 < out.stats.accepted_tokens < out.stats.draft_tokens


def test_dtype_and_the_callers_random_state() -> None:
    state = torch.random.get_rng_state()
    big = inflate(tiny_model("llama"), hidden_size=128, dtype=torch.bfloat16, device="cpu")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {p.dtype for p in big.parameters()} == {torch.bfloat16}


def test_presets_grow_smollm2_to_what_they_say() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from specdec.research.models.inflate import grown_config

    small = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    for name, billions in (("1b", 1.25), ("3b", 3.23), ("6b", 6.44)):
        with torch.device("meta"):
            big = LlamaForCausalLM(grown_config(small, PRESETS[name]))
        assert sum(p.numel() for p in big.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "grown", "named"),
    [
        ("gemma2", {"hidden_size": 64}, "gemma2"),
        ("mixtral", {"hidden_size": 64}, "mixtral"),
        ("qwen3", {"hidden_size": 64}, "qwen3"),
        ("llama", {"hidden_size": 16}, "hidden_size 16"),
        ("llama", {"layers": 2}, "num_hidden_layers 2"),
        ("llama", {"layers": 2.5}, "layers"),
        ("llama", {"hidden_size": 64, "seed": "x"}, "seed"),
        ("llama", {"hidden_size": 64, "dtype": torch.int8}, "floating point"),
    ],
)
def test_what_cannot_be_inflated_is_named(kind: str, grown: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecdecError, match=named):
        inflate(tiny_model(kind), **grown)


def test_an_inflation_as_text() -> None:
    assert Inflation.parse("1b") is PRESETS["1b"]
    assert Inflation.parse("hidden_size=64:layers=4") == Inflation(64, 4)
    for text in ("2b", "hidden_size=x", "width=64", ""):
        with pytest.raises(SpecdecError, match="expected 1b"):
            Inflation.parse(text)


def test_coarsen_moves_from_the_model_to_its_rounding() -> None:
    model = tiny_model("llama")
    assert torch.equal(logits(coarsen(model, 0.0)), logits(model))
    mine, half, rounded = (
        m.model.layers[0].mlp.up_proj.weight for m in (model, coarsen(model, 0.5), coarsen(model, 1))
    )
    torch.testing.assert_close(half, (mine + rounded) / 2)
    assert not torch.equal(mine, rounded)
    assert max(len(row.unique()) for row in rounded) <= 7  # 3 bits, symmetric
    assert torch.equal(coarsen(model, 1.0).lm_head.weight, model.lm_head.weight)
    with pytest.raises(SpecdecError, match="strength"):
        coarsen(model, 1.5)
    with pytest.raises(SpecdecError, match="no projection matrices"):
        coarsen(torch.nn.Linear(2, 2), 0.5)


@pytest.mark.parametrize("own", [True, False], ids=["own tables", "the target's tables"])
def test_an_inflated_head_drafts_for_the_inflated_model_what_the_head_drafts(own: bool) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    d, vocab = model.config.hidden_size, model.config.vocab_size
    tables = {"own_embedding": own, "own_lm_head": own, "draft_vocab_size": 20 if own else vocab}
    head = random_head(hidden_size=d, target_hidden_size=d, vocab_size=vocab, layer_ids=(1, 2, 3), **tables)
    sizes = Inflation(**GROWN)
    big, prompt = inflate(model, **GROWN), [[5, 6, 7, 8]]
    drafted = []
    for target, drafter in ((model, head), (big, load_script("inflate_head").inflate_head(head, model, sizes))):
        decoder = specdec.SpeculativeDecoder(target, strategies=[specdec.Eagle3(head=drafter, n_max=3)])
        drafted.append([r.draft for r in decoder.rounds(prompt[0], 12)])
    assert drafted[0] == drafted[1]
    assert len({tuple(d) for d in drafted[0]}) > 1


def test_a_head_with_norms_before_fc_is_refused() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    with pytest.raises(SpecdecError, match="without norms before fc"):
        load_script("inflate_head").inflate_head(random_head(fc_norm=True), model, Inflation(hidden_size=128))
