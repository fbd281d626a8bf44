"""A head's tensors under the names of `EagleHead`, whoever wrote them, and the vocabulary map that comes with them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.demo_models import head_path
from specdec.errors import SpecdecError
from specdec.files.texts import as_path, expanded, first_line, is_folder, read_json
from specdec.models.checkpoint import CONFIG, fault_of_weights

EMBEDDED = "demo-head"  # for demo-target
MAPS = ("d2t", "t2d")
# Made anew from the config, or the target's own: of no use here.
UNUSED = re.compile(r"(^|\.)(rotary_emb\.|verifier_norm\.|verifier_lm_head\.)")


def read_folder(source: Any, strategy: str = "eagle3") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a folder, or of `demo-head`. Raises SpecdecError for what is missing or damaged."""
    folder = head_path() if source == EMBEDDED else expanded(as_path(source, f"{strategy} head"))
    if not is_folder(folder):
        raise SpecdecError(f"{strategy}: there is no folder {folder}; give one with {CONFIG} and the head's weights")
    config = read_json(folder / CONFIG, "file")
    if not isinstance(config, dict):
        raise SpecdecError(f"{folder / CONFIG}: expected a JSON object, got {type(config).__name__}")
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    try:
        state = {name: tensor for file in files for name, tensor in _tensors(file).items()}
    except Exception as error:  # whatever a damaged file makes of it
        raise SpecdecError(fault_of_weights(folder) or f"{folder}: {first_line(error)}") from None
    if not state:
        raise SpecdecError(fault_of_weights(folder) or f"{folder}: its files hold no tensors")
    return config, state


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    return dict(torch.load(file, map_location="cpu", weights_only=True))


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under `EagleHead`'s names: without the prefix `model.` (NeMo), and with `layers.0.` for `midlayer.`
    (or `layers.N.` for `midlayer.N.`). Raises SpecdecError where two would have one name."""
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if UNUSED.search(name):
            continue
        short = re.sub(r"^midlayer\.(\d+\.)?", lambda m: f"layers.{m[1] or '0.'}", name.removeprefix("model."))
        if short in made:
            raise SpecdecError(f"eagle3: the checkpoint holds {short} twice, once as {name}; remove one of them")
        made[short] = tensor
    return made


def version_of(state: Mapping[str, Tensor]) -> int:
    """3, or 1 for heads of EAGLE-1 and EAGLE-2, by their keys. Raises SpecdecError for anything else."""
    has = state.__contains__
    if has("fc.weight") and has("layers.0.hidden_norm.weight"):
        return 3
    if has("fc.weight") and has("layers.0.self_attn.q_proj.weight") and not has("layers.0.input_layernorm.weight"):
        return 1
    raise SpecdecError(
        "eagle3: these are no weights of an EAGLE head: EAGLE-3 has fc.weight and midlayer.hidden_norm.weight (or "
        "layers.0.hidden_norm.weight), EAGLE-1 and EAGLE-2 have fc.weight and layers.0 without input_layernorm; found "
        f"{', '.join(sorted(state)[:6]) or 'nothing'}"
    )


def vocabulary_map(state: dict[str, Tensor], draft: int, vocab: int, notes: list[str]) -> Tensor | None:
    """Take d2t and t2d out of `state`; target id minus draft id [draft], or None where both vocabularies are the same.
    Raises SpecdecError for maps that lead out of the vocabulary, are ambiguous or contradict each other."""
    d2t, t2d = (state.pop(name, None) for name in MAPS)
    if d2t is None and t2d is None:
        if draft != vocab:
            raise SpecdecError(
                f"eagle3: the head proposes {draft} of {vocab} tokens, but its checkpoint has no d2t that says which; "
                "take d2t from the folder that it was trained into"
            )
        return None
    places = torch.arange(draft)
    if d2t is None:
        assert t2d is not None
        notes.append("the checkpoint has no d2t; it was made from t2d")
        used = t2d.reshape(-1).bool().nonzero()[:, 0]
        if len(used) != draft:
            raise SpecdecError(f"eagle3: t2d marks {len(used)} tokens, but the head has {draft} draft ids")
        d2t = used - places
    if d2t.shape != (draft,) or d2t.is_floating_point():
        raise SpecdecError(
            f"eagle3: d2t has the shape {list(d2t.shape)} and {d2t.dtype}; expected {draft} whole numbers, one for "
            "each row of lm_head"
        )
    d2t = d2t.long()
    _check_ids(places + d2t, d2t, t2d, vocab)
    return None if draft == vocab and not d2t.any() else d2t


def _check_ids(ids: Tensor, d2t: Tensor, t2d: Tensor | None, vocab: int) -> None:
    """Raise SpecdecError unless draft ids stand for different tokens of the target, those that t2d marks."""
    marked = None if t2d is None else t2d.reshape(-1).bool()
    if marked is not None and len(marked) != vocab:
        raise SpecdecError(f"eagle3: t2d has {len(marked)} entries, and the target's vocabulary {vocab} tokens")
    absolute = len(d2t) > 1 and bool((d2t.diff() > 0).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < vocab
    absolute = absolute and (marked is None or bool(marked[d2t].all()))
    hint = "d2t seems to hold target ids; subtract 0, 1, 2, ... from it" if absolute else "the map is damaged"
    outside = ((ids < 0) | (ids >= vocab)).nonzero()[:, 0]
    if len(outside):
        first = int(outside[0])
        raise SpecdecError(f"eagle3: d2t sends draft id {first} to token {int(ids[first])} of {vocab}: {hint}")
    if len(ids.unique()) != len(ids):
        raise SpecdecError(f"eagle3: d2t sends two draft ids to one token: {hint}")
    if marked is not None and not torch.equal(ids.sort().values, marked.nonzero()[:, 0]):
        raise SpecdecError(f"eagle3: d2t and t2d name different tokens: {hint}; take both from one training run")
