"""Distillation of a causal language model: the draft is trained on the target's answers, with the losses of heads.

It may start from a checkpoint, from random weights in a shape of one's own, or as layers of the target itself.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from specdec.drafters import DraftModel
from specdec.errors import SpecdecError, unknown_name
from specdec.files.forms import Maybe, check, whole
from specdec.models.checkpoint import LARGEST, MOST_LAYERS, OPTIONAL_SIZES, SIZES, said
from specdec.models.loading import LoadedPair
from specdec.training.config import DraftStart, TrainingConfig
from specdec.training.features import Batch
from specdec.training.losses import TargetDistribution
from specdec.training.task import Figures, summed


def make_draft(start: DraftStart, target: Any, config: TrainingConfig) -> Any:
    """A draft in float32. Raises SpecdecError for one that cannot draft for the target."""
    if start.checkpoint is not None:
        pair = LoadedPair.load(
            config.target,
            start.checkpoint,
            device="cpu",
            draft_dtype="float32",
            trust_remote_code=config.trust_remote_code,
        )
        made = pair.draft
    elif start.layers is not None:
        made = pruned(target, start.layers)
    else:
        made = _new(target.config, start.options, config.seed)
    if made.config.get_text_config().vocab_size != target.config.get_text_config().vocab_size:
        raise SpecdecError("draft: its vocabulary is not the target's; train a draft that has the same tokens")
    return made.float().requires_grad_(True)


def _new(config: Any, options: Any, seed: int) -> Any:
    """A model of random weights, of the target's config but for `options`. Raises SpecdecError for options that no
    model can have, or that transformers would refuse when it is saved or loaded."""
    made = copy.deepcopy(config)
    sizes: dict[str, Any] = {name: whole(1, LARGEST) for name in SIZES} | {"num_hidden_layers": whole(1, MOST_LAYERS)}
    sizes["max_position_embeddings"] = whole(1)
    sizes |= {name: Maybe(whole(1, LARGEST)) for name in OPTIONAL_SIZES}
    check(dict(options), {name: form for name, form in sizes.items() if name in options}, "draft: options")
    for name in options:
        if not hasattr(made, name):
            raise unknown_name("field of the target's config", name, sorted(made.to_dict()))
    try:
        for name, value in options.items():
            setattr(made, name, value)
        _match_layers(made, range(made.num_hidden_layers))
        with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
            model.config.save_pretrained(folder)  # it validates, which setting a field does not
            type(model.config).from_pretrained(folder)
            return model
    except Exception as error:  # each kind of model has faults of its own
        raise SpecdecError(f"draft: options make no model: {said(error)}") from None


def pruned(target: Any, layers: Sequence[int]) -> Any:
    """The target with these of its decoder layers alone; weights are copied."""
    blocks = target.config.get_text_config().num_hidden_layers
    if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= blocks:
        raise SpecdecError(f"draft: layers must ascend from 0 to at most {blocks - 1}, got {list(layers)}")
    found = [n for n, m in target.named_modules() if isinstance(m, nn.ModuleList) and len(m) == blocks]
    if len(found) != 1:
        raise SpecdecError(f"draft: the {blocks} layers of {type(target).__name__} cannot be told apart; use options")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    _match_layers(config, layers)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    source, prefix = target.state_dict(), f"{found[0]}."

    def origin(name: str) -> str:
        if not name.startswith(prefix):
            return name
        number, rest = name.removeprefix(prefix).split(".", 1)
        return f"{prefix}{layers[int(number)]}.{rest}"

    made.load_state_dict({name: source[origin(name)] for name in made.state_dict()})
    return made


def _match_layers(config: Any, layers: Sequence[int]) -> None:
    """Keep the types of these layers, of models whose layers differ."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = [kinds[i % len(kinds)] for i in layers]


class DraftTraining(nn.Module):
    """A draft with its loss: the module that is trained."""

    def __init__(self, model: nn.Module, loss: str, temperature: float):
        super().__init__()
        self.model, self.loss, self.temperature = model, loss, temperature

    def forward(self, batch: Batch) -> Figures:
        """The loss at every token of the answers, and in eval mode the expected acceptance."""
        target = TargetDistribution(batch.logits[:, :-1], None, self.temperature)
        logits = self.model(input_ids=batch.ids, use_cache=False).logits[:, 1:-1]
        return Figures.of([summed(target, self.loss, logits, 1, batch.scored(0), not self.training)], 1.0)


class DraftTask:
    """A draft model in training."""

    layers: tuple[int, ...] = ()
    steps = 1

    def __init__(self, model: Any, tokenizer: Any, config: TrainingConfig):
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.module = DraftTraining(model, config.loss, config.data.temperature)

    def decoding(self, length: int) -> tuple[Any, list[Any]]:
        return self.model, [DraftModel(n_max=length)]

    def save(self, folder: Path) -> None:
        """As a folder that `--draft` takes."""
        saved = copy.deepcopy(self.model).to(getattr(torch, self.config.save_dtype))
        saved.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
