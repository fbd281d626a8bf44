"""The models of a benchmark, built once and shared by all contenders."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch

from specdec.config import as_list
from specdec.decoder import SpeculativeDecoder
from specdec.decoding.provenance import hash_template
from specdec.errors import SpecdecError
from specdec.models.loading import LoadedPair, pick_device
from specdec.models.runner import Runner
from specdec.research.bench.config import DataChoice, ModelChoice, Scenario
from specdec.research.models.inflate import Inflation, coarsen, inflate
from specdec.research.models.smollm2 import fetch_folder
from specdec.research.prompts.datasets import Prompt, encode_texts, load_prompts

SMOLLM2 = "smollm2-135m"


def placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model on `device`, its parameters in `dtype`. Buffers keep theirs, as in `from_pretrained`: frequencies of
    rotations rounded to bfloat16 are other positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype)
    return model.to(device)


@dataclass
class Pair:
    """Target and draft on the device, tokenizer, and decoders of them. Contenders leave the models as they are."""

    target: Any
    draft: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    folder: tempfile.TemporaryDirectory[str] | None = None
    decoders: dict[Any, SpeculativeDecoder] = field(default_factory=dict)

    @staticmethod
    def build(choice: ModelChoice) -> Pair:
        """Raises SpecdecError for what cannot be loaded.

        An inflated target is built on the device at once, from the small model in host memory; the draft that is made
        of the target is coarsened in float32 before it is rounded to the dtype.
        """
        device = pick_device(choice.device)
        dtype = getattr(torch, choice.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        sizes = Inflation.parse(choice.inflate) if choice.inflate is not None else None
        draft_name = None if choice.draft is None else locate(choice.draft)
        home = torch.device("cpu") if sizes is not None or choice.draft is None else device
        loaded = LoadedPair.load(
            locate(choice.target), draft_name, device=home, dtype="float32", draft_dtype="float32"
        )  # fmt: skip
        draft = loaded.draft if choice.coarsen is None else coarsen(loaded.target, choice.coarsen)
        if sizes is None:
            target = placed(loaded.target, device, dtype)
        else:
            target = inflate(loaded.target, **asdict(sizes), dtype=dtype, device=device)
        draft = placed(draft, device, dtype)
        return Pair(target.eval(), draft.eval(), loaded.tokenizer, device, dtype)

    def decoder(
        self, compile: str, draft_compile: str | None, exact: Any, fuse: bool = False
    ) -> SpeculativeDecoder:  # fmt: skip
        """The decoder of these settings; contenders that differ in their strategies alone share it.

        Models are tested once, eagerly: each decoder's own self-test would compile passes that no run needs.
        """
        key = (compile, draft_compile or compile, exact, fuse)
        if key not in self.decoders:
            if not self.decoders:
                SpeculativeDecoder(self.target, self.draft, self.tokenizer)
            made = SpeculativeDecoder(
                self.target, self.draft, self.tokenizer, compile=compile, exact=exact, fuse=fuse, check=False
            )  # fmt: skip
            if key[1] != compile:
                made.draft = Runner(self.draft, None, key[1], fuse=fuse)
            self.decoders[key] = made
        return self.decoders[key]

    @cached_property
    def draft_folder(self) -> str:
        """The draft as a folder, for those who load it themselves."""
        self.folder = tempfile.TemporaryDirectory(prefix="specdec-bench-")
        self.draft.save_pretrained(self.folder.name)
        self.tokenizer.save_pretrained(self.folder.name)
        return self.folder.name

    def close(self) -> None:
        """Remove what was written."""
        if self.folder is not None:
            self.folder.cleanup()

    @property
    def eos(self) -> list[int]:
        """The ids that end a row."""
        return [int(t) for t in as_list(getattr(self.target.generation_config, "eos_token_id", None))]

    @property
    def weights(self) -> dict[str, int]:
        """Bytes of both models' parameters."""
        return {role: parameter_bytes(m) for role, m in (("target", self.target), ("draft", self.draft))}

    def facts(self) -> dict[str, Any]:
        """Shapes, parameters and bytes of both models."""
        names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        made: dict[str, Any] = {"dtype": str(self.dtype).removeprefix("torch.")}
        for role, model in (("target", self.target), ("draft", self.draft)):
            size = sum(p.numel() for p in model.parameters())
            shapes = {name: getattr(model.config, name, None) for name in names}
            made[role] = {"parameters": size, "bytes": self.weights[role], "read": bytes_read(model), **shapes}
        return made


def parameter_bytes(model: Any) -> int:
    """Bytes of a model's parameters."""
    return sum(p.nbytes for p in model.parameters())


def bytes_read(model: Any) -> int:
    """Bytes of weights that a pass reads: all but an embedding of its own, of which it reads some rows."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and head.weight.data_ptr() == embedding.data_ptr()
    return parameter_bytes(model) - (0 if tied else embedding.nbytes)


def locate(name: str) -> str:
    """A model's name as the loader takes it. Raises SpecdecError where SmolLM2 cannot be had."""
    if name != SMOLLM2:
        return name
    try:
        return str(fetch_folder())
    except ImportError as error:
        raise SpecdecError(f"{SMOLLM2} cannot be read: {error} (extra `gguf` of specdec)") from error


@dataclass(frozen=True)
class Item:
    """One call's prompts. template: a hash of the chat template that they went through, None = through none."""

    ids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    template: str | None = None

    @property
    def longest(self) -> int:
        return max(len(p) for p in self.prompts)


def items(pair: Pair, data: DataChoice, scenario: Scenario) -> list[Item]:
    """The prompts of a scenario in calls of `batch` rows, the longest call first: the first call is the warm-up's, and
    what it allocates and compiles then serves the others. Raises SpecdecError for too few prompts."""
    chosen = load_prompts(data.dataset, data.categories, scenario.prompts, data.seed)
    if len(chosen) < scenario.prompts:
        raise SpecdecError(f"data: {data.dataset} has {len(chosen)} of the {scenario.prompts} prompts asked for")
    template = hash_template(pair.tokenizer) if scenario.context is None else None
    if scenario.context is None:
        rows = encode_texts(chosen, pair.tokenizer, pair.target, data.longest)
    else:
        everything = load_prompts(data.dataset, data.categories)
        rows = long_rows(chosen, everything, pair.tokenizer, scenario.context)
    named = [(prompt.id, tuple(row)) for prompt, row in zip(chosen, rows, strict=True)]
    named.sort(key=lambda entry: -len(entry[1]))
    groups = [named[i : i + scenario.batch] for i in range(0, len(named), scenario.batch)]
    return [Item(tuple(n for n, _ in group), tuple(r for _, r in group), template) for group in groups]


def long_rows(chosen: Sequence[Prompt], others: Sequence[Prompt], tokenizer: Any, length: int) -> list[list[int]]:
    """For every prompt, a row of `length` ids: other texts of the set, each prompt beginning elsewhere in it, and the
    prompt last. Raises SpecdecError for a set that is too short."""
    rows = []
    for i, prompt in enumerate(chosen):
        start = i * len(others) // len(chosen)
        ids = _encoded(prompt, tokenizer)
        for other in [p for p in (*others[start:], *others[:start]) if p.id != prompt.id]:
            if len(ids) >= length:
                break
            ids = _encoded(other, tokenizer) + ids
        if len(ids) < length:
            raise SpecdecError(f"data: the prompts have {len(ids)} tokens together, fewer than the context of {length}")
        rows.append(ids[-length:])
    return rows


def _encoded(prompt: Prompt, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(prompt.text + "\n\n", add_special_tokens=False)["input_ids"]
    return ids


def sampled(generate: Mapping[str, Any]) -> bool:
    """Whether generation options draw tokens."""
    return float(generate.get("temperature", 0.0)) > 0
