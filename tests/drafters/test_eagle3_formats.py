"""Heads as other tools publish them: what is read, what is said about it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.drafters.eagle3 import LAYOUTS, EagleHead, LoadedHead, export, load_head
from specdec.errors import SpecdecError
from tests.helpers.eagle3 import case_files, causal, random_head, read_case, weights_of

Config = dict[str, Any]
State = dict[str, Tensor]
IDS = "eagle_aux_hidden_state_layer_ids"


def checkpoint(head: EagleHead | None = None, layout: str = "specforge", **export_options: Any) -> tuple[Config, State]:
    """A small checkpoint without our own mark, as if another tool had written it."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        export(head or random_head(3), folder, layout, **export_options)
        config = json.loads((Path(folder) / "config.json").read_text())
        state = load_file(Path(folder) / "model.safetensors")
    config.pop("specdec")
    return config, state


def logits_of(head: EagleHead, seed: int = 0) -> Tensor:
    """Two passes' logits: from states, and from the head's own output."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, head.config.vocab_size, (1, 5), generator=rng)
    states = torch.randn((1, 5, head.config.observed_size), generator=rng)
    embeddings = torch.randn((1, 5, head.config.hidden_size), generator=rng)
    if head.config.own_embedding:
        embeddings = head.embed(ids)
    mask, positions = causal(5), torch.arange(5)[None]
    first, feature = head(embeddings, states, positions, mask)
    second, _ = head(embeddings, feature, positions, mask, observed=False)
    return torch.cat([first, second])


def same(a: LoadedHead | EagleHead, b: EagleHead) -> bool:
    a = a.head if isinstance(a, LoadedHead) else a
    return torch.equal(logits_of(a), logits_of(b))


# -- every layout, there and back -------------------------------------------------------------------------------------

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "safeailab": ("safeailab", {}),
    "angelslim": ("angelslim", {}),
    "specforge": ("specforge", {"layer_ids": (2, 4, 7), "fc_norm": True, "norm_output": True}),
    "specforge, ids from 1": ("specforge", {"layer_ids": (1, 3, 4)}),
    "speculators": ("speculators", {"layer_ids": (2, 4, 7), "norm_before_residual": True, "norm_before_fc": True}),
    "speculators, qwen3, layers": ("speculators", {"qk_norm": True, "num_hidden_layers": 3, "norm_output": True}),
    "two states": ("specforge", {"observed": 2, "layer_ids": (3, 6)}),
    "full vocabulary": ("specforge", {"draft_vocab_size": 30}),
    "tied": ("specforge", {"draft_vocab_size": 30, "tied": True, "own_lm_head": False}),
    "biases": ("speculators", {"biases": ("q_proj", "k_proj", "v_proj", "o_proj")}),
    "eagle-1": (
        "safeailab",
        {
            "version": 1, "observed": 1, "target_hidden_size": 16, "final_norm": False, "draft_vocab_size": 30,
            "biases": ("fc",), "own_lm_head": False,
        },
    ),
    "llama3 rope": (
        "specforge",
        {
            "rope": {
                "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_what_is_exported_is_read_back(name: str, tmp_path: Path) -> None:
    layout, changes = HEADS[name]
    head = random_head(4, **changes)
    if not head.config.own_lm_head and not head.config.tied:
        table = torch.nn.Linear(16, 30, bias=False)
        head.borrow(None, table)
    export(head, tmp_path, layout)
    loaded = load_head(tmp_path)
    if not head.config.own_lm_head and not head.config.tied:
        loaded.head.borrow(None, table)
    assert loaded.layout == layout
    assert loaded.head.config == head.config
    assert same(loaded, head)
    assert loaded.head.d2t is None if head.d2t is None else torch.equal(loaded.head.d2t, head.d2t)


def test_pytorch_files_and_shards_are_read(tmp_path: Path) -> None:
    head = random_head(3)
    config, state = checkpoint(head)
    for kind in ("bin", "shards"):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if kind == "bin":
            torch.save(state, folder / "pytorch_model.bin")
        else:
            names = sorted(state)
            for i, part in enumerate((names[:5], names[5:])):
                save_file({n: state[n] for n in part}, folder / f"model-0000{i + 1}-of-00002.safetensors")
        assert same(load_head(folder), head)


def test_published_names_of_speculators_and_nemo() -> None:
    """The same weights under `layers.0.`, under `midlayer.0.` and with the prefix `model.`."""
    head = random_head(3)
    config, state = checkpoint(head)
    for rename in (
        lambda n: n.replace("midlayer.", "layers.0."),
        lambda n: n.replace("midlayer.", "midlayer.0."),
        lambda n: n if n in ("d2t", "t2d", "lm_head.weight") else f"model.{n}",
    ):
        assert same(load_head((config, {rename(n): t for n, t in state.items()})), head)


def test_fields_that_speculators_leaves_out_are_transformers_defaults() -> None:
    """Its config.json holds only what differs from the defaults of llama or qwen3."""
    head = random_head(3, rms_norm_eps=1e-6, max_position_embeddings=2048)
    config, state = checkpoint(head, "speculators")
    layer = config["transformer_layer_config"]
    for name in ("rms_norm_eps", "max_position_embeddings", "hidden_act", "rope_theta", "rope_scaling"):
        del layer[name]
    assert same(load_head((config, state)), head)


@pytest.mark.parametrize("file", case_files(), ids=lambda file: file.stem)
def test_the_reference_heads_are_read_without_a_word(file: Path) -> None:
    state = weights_of(read_case(file))
    config = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
              "rms_norm_eps": 1e-5, "rope_theta": 1e4, "draft_vocab_size": 20}  # fmt: skip
    loaded = load_head((config, state))
    assert loaded.notes == ()
    assert loaded.layout == "safeailab"
    assert loaded.head.config.layer_ids is None
    assert loaded.head.config.observed_layers(32) == (2, 16, 29)


# -- traps that the field fell into -----------------------------------------------------------------------------------


def test_layer_ids_that_begin_with_1_name_outputs_of_blocks() -> None:
    config, state = checkpoint(random_head(3, layer_ids=(2, 4, 7)))
    assert load_head((config, state)).head.config.layer_ids == (2, 4, 7)
    for place in ("top", "nested", "both"):
        given = {k: v for k, v in config.items() if k not in (IDS, "eagle_config")}
        if place != "nested":
            given[IDS] = [1, 3, 6]
        if place != "top":
            given["eagle_config"] = {IDS: [1, 3, 6]}
        loaded = load_head((given, state))
        assert loaded.head.config.layer_ids == (2, 4, 7)
        assert any("read as states before blocks [2, 4, 7]" in note for note in loaded.notes)
        chosen = load_head((given, state), {"layer_ids": [1, 3, 6]})
        assert chosen.head.config.layer_ids == (1, 3, 6)


def test_our_own_exports_are_not_moved(tmp_path: Path) -> None:
    notes = export(random_head(3, layer_ids=(1, 3, 6)), tmp_path)
    assert load_head(tmp_path).head.config.layer_ids == (1, 3, 6)
    assert "SGLang takes layer ids that begin with 1" in notes[0]


def test_contradicting_layer_ids_are_refused() -> None:
    config, state = checkpoint(random_head(3, layer_ids=(2, 4, 7)))
    with pytest.raises(SpecdecError, match="with different values"):
        load_head((config | {IDS: [2, 5, 7]}, state))


@pytest.mark.parametrize("ids", [(2, 2, 5), (5, 4, 3), (-1, 2, 3), (2, 4, 9)])
def test_layers_that_the_target_lacks_are_refused(ids: tuple[int, ...]) -> None:
    head = random_head(3, layer_ids=ids)
    with pytest.raises(SpecdecError, match="cannot be observed in a target of 8 blocks"):
        head.config.observed_layers(8)


def test_default_layers_need_a_deep_enough_target() -> None:
    config = random_head(3).config
    assert config.observed_layers(8) == (2, 4, 5)
    with pytest.raises(SpecdecError, match=r"default layers \[2, 2, 1\] cannot be observed in a target of 4 blocks"):
        config.observed_layers(4)
    with pytest.raises(SpecdecError, match=r"belong to another target; if it is this one's, give .* 0 to at most 3$"):
        config.observed_layers(4)


def test_the_two_meanings_of_norm_output() -> None:
    plain, fed_back = random_head(3), random_head(3, norm_output=True)
    config, state = checkpoint(plain)
    del config["norm_output"]
    assert same(load_head((config, state)), plain)
    new = load_head((config | {"norm_output": True}, state))
    assert same(new, fed_back)
    assert not same(new, plain)
    assert any("for such a head set norm_output=False" in note for note in new.notes)
    assert same(load_head((config | {"norm_output": True}, state), {"norm_output": False}), plain)
    speculators, state = checkpoint(fed_back, "speculators")
    loaded = load_head((speculators, state))
    assert same(loaded, fed_back)
    assert not any("norm_output" in note for note in loaded.notes)


def test_no_norm_at_all_as_old_specforge_meant_false() -> None:
    config, state = checkpoint(random_head(3))
    without = {k: v for k, v in state.items() if k != "norm.weight"}
    stated = load_head((config | {"norm_output": False}, without))
    assert not stated.head.config.final_norm
    chosen = load_head((config | {"norm_output": False}, state), {"final_norm": False})
    assert same(chosen, stated.head)
    del config["norm_output"]
    with pytest.raises(SpecdecError, match=r"lacks norm\.weight"):
        load_head((config, without))
    with pytest.raises(SpecdecError, match="no layout says that there is no norm"):
        export(stated.head, "unused")


def test_a_tied_flag_copied_from_the_target_does_not_tie() -> None:
    head = random_head(3)
    config, state = checkpoint(head, "angelslim")
    loaded = load_head((config | {"tie_word_embeddings": True}, state))
    assert same(loaded, head)
    assert any("has its own lm_head; that is used" in note for note in loaded.notes)


def test_a_head_that_is_tied_needs_the_full_vocabulary() -> None:
    head = random_head(3, draft_vocab_size=30, own_lm_head=False, tied=True)
    config, state = checkpoint(head)
    assert "lm_head.weight" not in state
    loaded = load_head((config, state))
    assert same(loaded, head)
    assert any("it is tied" in note for note in loaded.notes)
    with pytest.raises(SpecdecError, match="tied to the embedding, but the head proposes 12 of 30 tokens"):
        load_head((config | {"draft_vocab_size": 12}, state))


def test_a_head_without_tables_borrows_the_targets() -> None:
    config, state = checkpoint(random_head(3, draft_vocab_size=30, target_hidden_size=16))
    bare = {k: v for k, v in state.items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    head = load_head((config, bare)).head
    with pytest.raises(SpecdecError, match="has no embed_tokens"):
        head.borrow(None, None)
    embedding = torch.nn.Embedding(30, 16)
    with pytest.raises(SpecdecError, match="has no lm_head"):
        head.borrow(embedding, None)
    table = torch.nn.Linear(16, 30, bias=False)
    head.borrow(embedding, table)
    assert torch.equal(head.embed(torch.tensor([3])), embedding.weight[3:4])
    normed = torch.randn(1, 1, 16)
    assert torch.equal(head.logits(normed), table(normed))
    assert not any(k.startswith("borrowed") for k in head.state_dict())


def test_missing_rope_theta_is_10000_and_said() -> None:
    head = random_head(3)
    config, state = checkpoint(head)
    del config["rope_theta"]
    loaded = load_head((config, state))
    assert same(loaded, head)
    assert any("no rope_theta; 10000 is used" in note for note in loaded.notes)
    other = load_head((config | {"rope_theta": 500.0}, state))
    assert not same(other, head)
    new = load_head((config | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, state))
    assert same(new, other.head)
    assert not any("rope_theta" in note for note in new.notes)


def test_the_weights_say_how_wide_an_attention_head_is() -> None:
    head = random_head(3)
    config, state = checkpoint(head)
    loaded = load_head((config | {"head_dim": 8}, state))
    assert same(loaded, head)
    assert any("config.json says head_dim 8, but the weights have 4" in note for note in loaded.notes)


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
@pytest.mark.parametrize(("name", "found"), [("num_hidden_layers", 1), ("intermediate_size", 24)])
def test_sizes_that_the_weights_do_not_have_are_said(name: str, found: int, layout: str) -> None:
    head = random_head(3)
    config, state = checkpoint(head, layout)
    part = config["transformer_layer_config"] if layout == "speculators" else config
    assert not any(name in note for note in load_head((config, state)).notes)
    part[name] = 3
    loaded = load_head((config, state))
    assert same(loaded, head)
    assert f"config.json says {name} 3, but the weights have {found}; used" in loaded.notes
    part["rms_norm_eps"] = None
    with pytest.raises(SpecdecError, match="rms_norm_eps: expected a finite number"):
        load_head((config, state))


def maps(change: Callable[[State], Any]) -> tuple[Config, State]:
    config, state = checkpoint(random_head(3))
    change(state)
    return config, state


MAPS: dict[str, tuple[Callable[[State], Any], str]] = {
    "out of range": (lambda s: s["d2t"].__setitem__(-1, 90), "d2t sends draft id 11 to token 101 of 30"),
    "negative": (lambda s: s["d2t"].__setitem__(0, -1), "d2t sends draft id 0 to token -1 of 30"),
    "twice": (lambda s: s["d2t"].__setitem__(1, s["d2t"][0] - 1), "two draft ids to one token"),
    "not those of t2d": (lambda s: s.update(t2d=s["t2d"].roll(1)), "d2t and t2d name different tokens"),
    "target ids": (lambda s: s.update(d2t=s["t2d"].nonzero()[:, 0]), "d2t seems to hold target ids"),
    "too short": (lambda s: s.update(d2t=s["d2t"][:-1]), r"d2t has the shape \[11\]"),
    "t2d too short": (lambda s: s.update(t2d=s["t2d"][:-1]), "t2d has 29 entries"),
    "neither": (lambda s: (s.pop("d2t"), s.pop("t2d")), "has no d2t that says which"),
    "t2d alone, of another head": (lambda s: (s.pop("d2t"), s["t2d"].fill_(True)), "t2d marks 30 tokens"),
}


@pytest.mark.parametrize("fault", MAPS)
def test_wrong_vocabulary_maps_are_refused(fault: str) -> None:
    change, words = MAPS[fault]
    with pytest.raises(SpecdecError, match=words):
        load_head(maps(change))


def test_one_vocabulary_map_is_enough() -> None:
    head = random_head(3)
    assert same(load_head(maps(lambda s: s.pop("t2d"))), head)
    loaded = load_head(maps(lambda s: s.pop("d2t")))
    assert head.d2t is not None
    assert loaded.head.d2t is not None
    assert torch.equal(loaded.head.d2t, head.d2t)
    assert any("made from t2d" in note for note in loaded.notes)


def target(**changes: Any) -> Any:
    return SimpleNamespace(**{"hidden_size": 20, "vocab_size": 30, "num_hidden_layers": 8} | changes)


def test_a_head_for_another_target_is_refused() -> None:
    given = checkpoint(random_head(3))
    load_head(given, target=target())
    with pytest.raises(SpecdecError, match="for targets of hidden size 20, this one has 24"):
        load_head(given, target=target(hidden_size=24))
    with pytest.raises(SpecdecError, match="for a vocabulary of 30 tokens, the target has 31"):
        load_head(given, target=target(vocab_size=31))
    with pytest.raises(SpecdecError, match="cannot be observed in a target of 3 blocks"):
        load_head(given, target=target(num_hidden_layers=3))
    config, state = given
    bare = {k: v for k, v in state.items() if k != "embed_tokens.weight"}
    with pytest.raises(SpecdecError, match="16 wide and has no embed_tokens"):
        load_head((config, bare), target=target())


def test_norms_that_others_ignore_are_used_and_said() -> None:
    for option, key in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        head = random_head(3, **{option: True})
        config, state = checkpoint(head, "speculators")
        loaded = load_head((config | {option: False}, state))
        assert same(loaded, head)
        assert any(f"does not say {option}, but the checkpoint has {key}" in note for note in loaded.notes)
        missing = {k: v for k, v in state.items() if not k.startswith(key.split(".")[0])}
        with pytest.raises(SpecdecError, match=f"says {option}, but the checkpoint lacks {key}"):
            load_head((config, missing))


def test_early_stop_rows_of_angelslim_are_left_out() -> None:
    head = random_head(3)
    config, state = checkpoint(head, "angelslim")
    state["fc.weight"] = torch.cat([state["fc.weight"], torch.randn(3, state["fc.weight"].shape[1])])
    loaded = load_head((config, state))
    assert same(loaded, head)
    assert any("last 3 rows of fc predict when to stop" in note for note in loaded.notes)


# -- damaged and foreign files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    head = random_head(3)
    head.layers[0].mlp.up_proj.weight[2, 3] = value
    export(head, tmp_path, "specforge")
    with pytest.raises(SpecdecError, match=r"up_proj\.weight holds NaN or infinities, 1 of 384 values"):
        load_head(tmp_path)


def test_unknown_missing_and_misshapen_tensors_are_named() -> None:
    config, state = checkpoint(random_head(3))
    with pytest.raises(SpecdecError, match=r"has gist\.weight, which no head"):
        load_head((config, state | {"gist.weight": torch.zeros(2)}))
    with pytest.raises(SpecdecError, match=r"lacks layers\.0\.mlp\.up_proj\.weight"):
        load_head((config, {k: v for k, v in state.items() if "up_proj" not in k}))
    wrong = state | {"midlayer.mlp.up_proj.weight": torch.zeros(23, 16)}
    with pytest.raises(SpecdecError, match=r"up_proj\.weight has the shape \[23, 16\], and config\.json asks for \[24"):
        load_head((config, wrong))
    with pytest.raises(SpecdecError, match=r"holds fc\.weight twice"):
        load_head((config, state | {"model.fc.weight": state["fc.weight"]}))
    ignored = {"midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(2), "verifier_norm.weight": torch.zeros(2)}
    load_head((config, state | ignored))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size: expected a whole number"),
        ({"hidden_size": 24}, "has the shape"),
        ({"num_attention_heads": 5}, "not a multiple of 5 attention heads"),
        ({"num_attention_heads": "4"}, "num_attention_heads: expected a whole number"),
        ({"num_key_value_heads": 4}, "has the shape"),
        ({"draft_vocab_size": 13}, "d2t has the shape"),
        ({"vocab_size": 31}, "t2d has 30 entries"),
        ({"hidden_act": "swish9"}, "hidden_act 'swish9' is unknown"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' are not supported"),
        ({"rope_scaling": [1]}, "must be a mapping"),
        ({"eagle_config": [1]}, "expected a mapping"),
        ({IDS: ["a"]}, "expected a whole number"),
        ({IDS: [2, 4, 6, 7]}, r"fc\.weight has the shape \[16, 60\]"),
        ({IDS: [2, 4, 6, 7, 8, 9, 10], "target_hidden_size": None}, "not a multiple of 7 states"),
    ],
)
def test_wrong_configs_are_named(change: Config, words: str) -> None:
    config, state = checkpoint(random_head(3))
    with pytest.raises(SpecdecError, match=words):
        load_head((config | change, state))


def test_other_kinds_of_models_are_refused(tmp_path: Path) -> None:
    config, state = checkpoint(random_head(3), "speculators")
    with pytest.raises(SpecdecError, match="speculators model of type 'dflash'"):
        load_head((config | {"speculators_model_type": "dflash"}, state))
    layer = config["transformer_layer_config"] | {"model_type": "gpt2"}
    with pytest.raises(SpecdecError, match="model_type: expected 'llama' or 'qwen3', got 'gpt2'"):
        load_head((config | {"transformer_layer_config": layer}, state))
    sliding = config["transformer_layer_config"] | {"model_type": "qwen3", "layer_types": ["sliding_attention"]}
    with pytest.raises(SpecdecError, match="sliding window"):
        load_head((config | {"transformer_layer_config": sliding}, state))
    with pytest.raises(SpecdecError, match="no weights of an EAGLE head"):
        load_head((config, {"transformer.wte.weight": torch.zeros(2)}))
    with pytest.raises(SpecdecError, match="there is no folder"):
        load_head(tmp_path / "missing")
    with pytest.raises(SpecdecError, match="unknown field of an eagle3 head 'norm_outputs'"):
        load_head((config, state), {"norm_outputs": True})
    with pytest.raises(SpecdecError, match="layer_ids must name 3 layers"):
        load_head((config, state), {"layer_ids": [2, 4]})


def test_damaged_files_are_named(tmp_path: Path) -> None:
    export(random_head(3), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SpecdecError, match="damaged, cut or of another kind"):
        load_head(tmp_path)
    file.unlink()
    with pytest.raises(SpecdecError, match="has no weights"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SpecdecError, match="expected a JSON object"):
        load_head(tmp_path)


# -- what cannot be written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ("safeailab", {"norm_output": True}, "cannot say norm_output"),
        ("safeailab", {"layer_ids": (2, 4, 7)}, "cannot say layer_ids"),
        ("angelslim", {"fc_norm": True}, "cannot say fc_norm"),
        ("specforge", {"norm_before_residual": True}, "cannot say norm_before_residual"),
        ("specforge", {"num_hidden_layers": 2}, "cannot say num_hidden_layers"),
        ("safetensors", {}, "unknown layout"),
    ],
)
def test_layouts_that_cannot_say_what_the_head_is(layout: str, changes: Config, words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match=words):
        export(random_head(3, **changes), tmp_path, layout)
    assert list(tmp_path.iterdir()) == []


def test_what_the_serving_engines_read(tmp_path: Path) -> None:
    """The fields that vLLM and SGLang look at, by the names that they look for."""
    head = random_head(3, layer_ids=(2, 4, 7), norm_output=True)
    config, state = checkpoint(head, "specforge")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config[IDS] == config["eagle_config"][IDS] == [2, 4, 7]
    assert config["draft_vocab_size"] == 12
    assert config["target_hidden_size"] == 20
    assert state["d2t"].dtype == torch.int64
    assert state["t2d"].sum() == 12
    config, state = checkpoint(head, "speculators", verifier="some/model", drafted=4)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["norm_output"] is True
    assert "layers.0.hidden_norm.weight" in state
    assert set(LAYOUTS) == {"safeailab", "specforge", "angelslim", "speculators"}
