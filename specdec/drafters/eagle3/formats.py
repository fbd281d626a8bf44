"""Heads as other tools publish them: SafeAILab, SpecForge, AngelSlim, speculators, NeMo, EAGLE-1 and EAGLE-2.

The layout is found by keys and config. What can be read in two ways, or would be ignored elsewhere, is said in
`LoadedHead.notes`; what cannot work is refused. Any field of `HeadConfig` can be set over what was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.activations import ACT2FN

from specdec.config import unknown_name
from specdec.drafters.eagle3.config import ROPE, HeadConfig
from specdec.drafters.eagle3.head import EagleHead
from specdec.drafters.eagle3.weights import read_folder, renamed, version_of, vocabulary_map
from specdec.errors import SpecdecError
from specdec.files.forms import INTEGER, Maybe, OneOf, check, number, whole
from specdec.models.checkpoint import check_finite

H = TypeVar("H", bound=EagleHead)
LAYOUTS = ("safeailab", "specforge", "angelslim", "speculators")
MARK = "specdec"  # what our own exports say beside the layout's fields
IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = {"hidden_size": whole(1), "num_attention_heads": whole(1), "vocab_size": whole(1)}
OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "draft_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
)
NUMBERS = ("rms_norm_eps", "rope_theta")
LINEAR = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoadedHead:
    """A head, the layout that it was read from, and what a person should know about how it was read."""

    head: EagleHead
    layout: str
    notes: tuple[str, ...]


def load_head(source: Any, changes: Mapping[str, Any] | None = None, target: Any = None) -> LoadedHead:
    """Read a head.

    source: a folder with config.json and weights, or (config, state dict)
    changes: fields of `HeadConfig` that are to have other values than the files say
    target: the target's transformers config, to check that the head is one for it

    Raises SpecdecError for a head that is damaged, of another kind, or for another target.
    """
    given, state = source if isinstance(source, tuple) else read_folder(source)
    check(given, {}, "eagle3: config.json")
    reading = _Reading(given, renamed(state))
    config = _changed(reading.config(), changes or {})
    if target is not None:
        check_fit(config, target)
    d2t = vocabulary_map(reading.state, config.draft_vocab_size, config.vocab_size, reading.notes)
    head = filled(EagleHead, config, reading.state)
    head.d2t = d2t
    return LoadedHead(head, reading.layout, tuple(reading.notes))


def filled(kind: type[H], config: HeadConfig, state: dict[str, Tensor]) -> H:
    """Make a head of these tensors. Raises SpecdecError for tensors of another one."""
    with torch.device("meta"):
        head = kind(config)
    check_names(head, state)
    check_finite(state.items(), config.strategy)
    head.load_state_dict(state, assign=True)
    return head.eval().requires_grad_(False)


def check_fit(config: HeadConfig, target: Any, strategy: str = "eagle3") -> None:
    """Raise SpecdecError for a head that was made for another target."""
    text = target.get_text_config() if hasattr(target, "get_text_config") else target
    if config.target_hidden_size != text.hidden_size:
        raise SpecdecError(
            f"{strategy}: the head is for targets of hidden size {config.target_hidden_size}, this one has "
            f"{text.hidden_size}; use a head that was trained for this target"
        )
    if config.vocab_size != text.vocab_size:
        raise SpecdecError(
            f"{strategy}: the head is for a vocabulary of {config.vocab_size} tokens, the target has "
            f"{text.vocab_size}; use a head that was trained for this target"
        )
    if config.hidden_size != text.hidden_size and not (config.own_embedding and (config.own_lm_head or config.tied)):
        raise SpecdecError(
            f"{strategy}: the head is {config.hidden_size} wide and has no embed_tokens or lm_head of its own; the "
            f"target's are {text.hidden_size} wide and do not fit"
        )
    config.observed_layers(text.num_hidden_layers)


class _Reading:
    """One checkpoint while its config is made sense of."""

    def __init__(self, given: Mapping[str, Any], state: dict[str, Tensor]):
        self.given, self.state = given, state
        self.notes: list[str] = []
        self.layout = _layout(given)
        # vLLM wraps the config of an EAGLE-1 head as `model`.
        self.layer: Mapping[str, Any] = given.get("model") or given
        self.stated = self.layer  # without the defaults
        if self.layout == "speculators":
            self.stated = given.get("transformer_layer_config") or {}
            check(self.stated, {}, "eagle3: config.json: transformer_layer_config")
        if "rms_norm_eps" in self.stated:  # null: there is no norm without one
            check({"rms_norm_eps": self.stated["rms_norm_eps"]}, {"rms_norm_eps": number(0.0)}, "eagle3: config.json")
        if self.layout == "speculators":
            self.layer = _completed(given.get("transformer_layer_config"))
        check(self.layer, SIZES, "eagle3: config.json")
        stated = {name: self.layer.get(name) for name in (*OPTIONAL, *NUMBERS)}
        form = {name: Maybe(whole(1)) for name in OPTIONAL} | {name: Maybe(number(0.0)) for name in NUMBERS}
        check(stated, form, "eagle3: config.json")
        self.version = version_of(state)

    def config(self) -> HeadConfig:
        """Everything that the forward pass depends on."""
        layer, hidden = self.layer, int(self.layer["hidden_size"])
        self._drop_early_stop(hidden)
        ids = self._layer_ids()
        observed = 1 if self.version != 3 else len(ids or (0, 0, 0))
        target = self._option("target_hidden_size") or self._target_size(hidden, observed)
        heads = int(layer["num_attention_heads"])
        vocab = int(layer["vocab_size"])
        tied, own_lm_head, draft = self._lm_head(vocab)
        return HeadConfig(
            version=self.version,
            hidden_size=hidden,
            intermediate_size=self._found("intermediate_size", self._rows("layers.0.mlp.gate_proj.weight")),
            num_attention_heads=heads,
            num_key_value_heads=int(layer.get("num_key_value_heads") or heads),
            head_dim=self._head_dim(heads),
            vocab_size=vocab,
            draft_vocab_size=draft,
            target_hidden_size=int(target),
            num_hidden_layers=self._found("num_hidden_layers", self._layers()),
            observed=observed,
            layer_ids=ids,
            rms_norm_eps=float(layer.get("rms_norm_eps") or 1e-6),
            hidden_act=self._activation(),
            max_position_embeddings=int(layer.get("max_position_embeddings") or 2048),
            rope=self._rope(),
            qk_norm="layers.0.self_attn.q_norm.weight" in self.state,
            biases=tuple(n for n in LINEAR if any(k.endswith(f"{n}.bias") for k in self.state)),
            tied=tied,
            own_embedding="embed_tokens.weight" in self.state,
            own_lm_head=own_lm_head,
            **self._norms(),
        )

    def _option(self, name: str) -> Any:
        """A field of the head itself, which some tools put under `eagle_config`."""
        nested = self.given.get("eagle_config") or {}
        check(nested, {}, "eagle3: config.json: eagle_config")
        found = [part[name] for part in (self.given, nested, self.layer) if part.get(name) is not None]
        if any(value != found[0] for value in found):
            raise SpecdecError(f"eagle3: config.json has {name} with different values, {found}; leave one of them")
        return found[0] if found else None

    def _rows(self, name: str) -> int:
        if name not in self.state:
            raise SpecdecError(f"eagle3: the checkpoint lacks {name}; it is incomplete, or no head of this kind")
        return int(self.state[name].shape[0])

    def _drop_early_stop(self, hidden: int) -> None:
        """AngelSlim heads that predict when to stop have up to three more rows in fc."""
        extra = self._rows("fc.weight") - hidden
        if 0 < extra <= 3:
            self.state["fc.weight"] = self.state["fc.weight"][:hidden].clone()
            self.notes.append(f"the last {extra} rows of fc predict when to stop early; they are not used")

    def _layer_ids(self) -> tuple[int, ...] | None:
        """Observed layers as "before block i"; lists that begin with 1 name the outputs of blocks (SGLang's rule)."""
        ids = self._option(IDS)
        if self.version != 3 or not ids:
            return None
        check({IDS: ids}, {IDS: [INTEGER]}, "eagle3: config.json")
        if ids[0] != 1 or self.given.get(MARK):
            return tuple(ids)
        moved = tuple(i + 1 for i in ids)
        self.notes.append(
            f"{IDS} {list(ids)} begins with 1, so it names outputs of blocks; read as states before blocks "
            f"{list(moved)}; set layer_ids if acceptance is low"
        )
        return moved

    def _target_size(self, hidden: int, observed: int) -> int:
        width = int(self.state["fc.weight"].shape[1])
        if self.version != 3:
            return hidden
        if width % observed:
            raise SpecdecError(f"eagle3: fc takes {width} numbers, which is not a multiple of {observed} states")
        return width // observed

    def _head_dim(self, heads: int) -> int:
        rows = self._rows("layers.0.self_attn.q_proj.weight")
        if rows % heads:
            raise SpecdecError(f"eagle3: q_proj has {rows} rows, which is not a multiple of {heads} attention heads")
        return self._found("head_dim", rows // heads, self.layer.get("head_dim"))

    def _layers(self) -> int:
        return 1 + max(int(k.split(".")[1]) for k in self.state if k.startswith("layers."))

    def _found(self, name: str, found: int, stated: Any = None) -> int:
        """What the weights have, with a note if the config says something else."""
        stated = self.stated.get(name) if stated is None else stated
        if stated not in (None, found):
            self.notes.append(f"config.json says {name} {stated}, but the weights have {found}; used")
        return found

    def _activation(self) -> str:
        name = self.layer.get("hidden_act") or "silu"
        if name not in ACT2FN:
            raise SpecdecError(f"eagle3: config.json: hidden_act {name!r} is unknown; heads have 'silu' in most cases")
        return str(name)

    def _lm_head(self, vocab: int) -> tuple[bool, bool, int]:
        """(tied, own, draft vocabulary)."""
        own = "lm_head.weight" in self.state
        tied = bool(self.layer.get("tie_word_embeddings") or self.given.get("tie_word_embeddings"))
        stated = self._option("draft_vocab_size")
        if own:
            if tied:
                self.notes.append("tie_word_embeddings is true, but the head has its own lm_head; that is used")
            return False, True, stated or self._rows("lm_head.weight")
        if stated not in (None, vocab):
            what = "tied to the embedding" if tied else "missing"
            raise SpecdecError(
                f"eagle3: lm_head is {what}, but the head proposes {stated} of {vocab} tokens; it needs an lm_head of "
                f"{stated} rows, or draft_vocab_size {vocab}"
            )
        if self.version == 3:
            self.notes.append("the head has no lm_head; " + ("it is tied" if tied else "the target's is used"))
        return tied, False, vocab

    def _norms(self) -> dict[str, bool]:
        """Options of norms. Keys decide which norms there are: a tool that ignores them proposes badly."""
        has = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight", "final_norm": "norm.weight"}
        made = {name: key in self.state for name, key in has.items()}
        for name in ("norm_before_fc", "fc_norm"):
            stated = self._option(name)
            if stated and not made[name]:
                raise SpecdecError(f"eagle3: config.json says {name}, but the checkpoint lacks {has[name]}")
            if made[name] and not stated:
                self.notes.append(f"config.json does not say {name}, but the checkpoint has {has[name]}; used")
        made["norm_before_residual"] = bool(self._option("norm_before_residual"))
        made["norm_output"] = self._norm_output(made["final_norm"])
        return made

    def _norm_output(self, has_norm: bool) -> bool:
        stated = self._option("norm_output")
        if self.version == 3 and not has_norm and not (self.layout == "specforge" and stated is False):
            raise SpecdecError("eagle3: the checkpoint lacks norm.weight; it is incomplete")
        if self.layout == "specforge" and stated is not None and not self.given.get(MARK):
            meaning = (
                "the normed output is fed back (EAGLE-3.1)" if stated else "the output before the norm is fed back"
            )
            old = "norm_output=False" if stated else "final_norm=False"
            self.notes.append(
                f"norm_output is {str(stated).lower()}: read as vLLM and SGLang do, {meaning}; SpecForge up to 0.2.0 "
                f"meant the norm before lm_head: for such a head set {old}"
            )
        return bool(stated)

    def _rope(self) -> dict[str, Any]:
        """rope_type, rope_theta and the type's parameters, from the old fields or the new one."""
        layer = self.layer
        found = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
        if not isinstance(found, Mapping):
            raise SpecdecError(f"eagle3: config.json: the parameters of rope must be a mapping, got {found!r}")
        if found and all(isinstance(part, Mapping) for part in found.values()):
            found = found.get("full_attention", {})  # one set for each type of layers
        made = {k: v for k, v in found.items() if k not in ("type", "mrope_section")}
        kind = found.get("rope_type") or found.get("type") or "default"
        made["rope_type"] = "default" if kind == "mrope" else kind  # the same for texts
        theta: Any = found.get("rope_theta") or layer.get("rope_theta")
        if theta is None:
            self.notes.append(f"config.json has no rope_theta; {ROPE['rope_theta']:g} is used, as by the authors' code")
        made["rope_theta"] = float(theta or 10000.0)
        if (factor := layer.get("partial_rotary_factor")) is not None:
            made.setdefault("partial_rotary_factor", factor)
        if made["rope_type"] != "default" and layer.get("original_max_position_embeddings"):
            made.setdefault("original_max_position_embeddings", layer["original_max_position_embeddings"])
        return made


def _layout(given: Mapping[str, Any]) -> str:
    """Who wrote a config. Raises SpecdecError for speculators of other kinds."""
    kind = given.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise SpecdecError(f"eagle3: this is a speculators model of type {kind!r}; only 'eagle3' is supported")
    if kind or "transformer_layer_config" in given:
        return "speculators"
    names = given.get("architectures") or []
    if "LlamaForCausalLMEagle3" in names:
        return "specforge"
    return "angelslim" if "Eagle3LlamaForCausalLM" in names else "safeailab"


def _completed(layer: Any) -> Mapping[str, Any]:
    """The layer's configuration with the fields that speculators leaves out because they are transformers' defaults."""
    check(layer, {"model_type": OneOf(("llama", "qwen3"))}, "eagle3: config.json: transformer_layer_config")
    full: dict[str, Any] = AutoConfig.for_model(**layer).to_dict()
    kinds = (full.get("layer_types") or [])[: full["num_hidden_layers"]]
    if "sliding_attention" in kinds:
        raise SpecdecError("eagle3: the head has layers with a sliding window, which are not supported")
    return full


def _changed(config: HeadConfig, changes: Mapping[str, Any]) -> HeadConfig:
    known = [f.name for f in fields(HeadConfig)]
    for name in changes:
        if name not in known:
            raise unknown_name("field of an eagle3 head", name, known)
    made = dict(changes)
    if made.get("layer_ids") is not None:
        made["layer_ids"] = tuple(made["layer_ids"])
        if len(made["layer_ids"]) != config.observed:
            raise SpecdecError(f"eagle3: layer_ids must name {config.observed} layers, got {made['layer_ids']}")
    return replace(config, **made)


def check_names(head: EagleHead, state: dict[str, Tensor]) -> None:
    """Raise SpecdecError for tensors that are missing, unknown or of the wrong shape. A final norm that the head was
    told not to use is left out."""
    whose = head.config.strategy
    if not head.config.final_norm:
        state.pop("norm.weight", None)
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    missing, unknown = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing:
        raise SpecdecError(f"{whose}: the checkpoint lacks {', '.join(missing[:4])}; it is incomplete")
    if unknown:
        raise SpecdecError(
            f"{whose}: the checkpoint has {', '.join(unknown[:4])}, which no head that is known here has; it is of "
            "another kind, and would propose badly without them"
        )
    for name, shape in wanted.items():
        if tuple(state[name].shape) != shape:
            raise SpecdecError(
                f"{whose}: {name} has the shape {list(state[name].shape)}, and config.json asks for {list(shape)}; "
                "they are not of one head"
            )
