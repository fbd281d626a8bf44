"""Loading a pair: sources, and checks before anything is allocated.

Configs and tokenizers are read first and the pair report is made from them; what cannot work is refused there, by name,
before a weight is loaded. Two models of different hidden size are a normal pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec.config import PairConfig, from_dict
from specdec.demo_models import draft_path, target_path
from specdec.device.ambient import pinned
from specdec.device.memory import explaining, is_out_of_memory, size
from specdec.errors import SpecdecError
from specdec.files.texts import as_path, expanded, is_folder, model_path
from specdec.models.adapters import adapter_folders, load_adapter
from specdec.models.attention import check_attention
from specdec.models.bars import without_bars
from specdec.models.checkpoint import (
    CONFIG,
    check_finite,
    check_folder,
    fault_of_config,
    fault_of_gguf,
    fault_of_shapes,
    fault_of_tokenizer,
    fault_of_weights,
    said,
)
from specdec.models.kinds import OWN_STATES, is_recurrent, layer_kinds
from specdec.models.kv_cache import kv_dtype
from specdec.models.names import note_name
from specdec.models.pair_report import ModelFacts, PairReport
from specdec.models.quantised import check_activations
from specdec.models.recurrent_state import Recurrence
from specdec.models.rope import rope_settings, rope_type, switch_position
from specdec.models.tensor_parallel import loading_options, own_device

EMBEDDED = {"demo-target": target_path, "demo-draft": draft_path}


@dataclass(frozen=True)
class Source:
    """Where a model is stored: a hub id or folder `path`; for GGUF, the name `gguf` of a file in it."""

    path: str
    gguf: str | None = None

    @staticmethod
    def parse(text: str | Path) -> Source:
        """Parse a hub id, a folder, a GGUF file, or the embedded `demo-target` / `demo-draft`.

        Raises SpecdecError for a local path that does not exist.
        """
        if not isinstance(text, (str, Path)) or not str(text):
            raise SpecdecError(
                f"expected a hub id, a folder or a GGUF file, got {type(text).__name__}: models in hand go to the class"
            )
        name = str(text)
        if name in EMBEDDED:
            return Source(str(EMBEDDED[name]()))
        path = model_path(name)
        if name.endswith(".gguf"):
            return Source(str(path.parent), path.name)
        if is_folder(path):
            return Source(str(path))
        return Source(name)

    @property
    def folder(self) -> Path | None:
        """Folder of its files on this machine; None for a hub id that was not downloaded."""
        if is_folder(Path(self.path)):
            return Path(self.path)
        with suppress(Exception):  # what no hub can have has no files either
            found = try_to_load_from_cache(self.path, CONFIG)
            return Path(found).parent if isinstance(found, str) else None
        return None

    def fault(self, of: str, error: BaseException) -> str | None:
        """Name the file to blame for a failed load, and what is wrong with it; None if that cannot be told.

        of: "config", "tokenizer" or "weights"
        """
        folder = self.folder
        if self.gguf:
            return fault_of_gguf(Path(self.path) / self.gguf)
        if folder is None:
            return None
        if of == "weights":
            return fault_of_weights(folder)
        return (fault_of_config if of == "config" else fault_of_tokenizer)(folder, error)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"gguf_file": self.gguf} if self.gguf else {}

    def __str__(self) -> str:
        return f"{self.path}/{self.gguf}" if self.gguf else self.path


@dataclass
class LoadedPair:
    """Models, tokenizers and the report of a pair; draft and draft_tokenizer are None without a draft."""

    target: Any
    draft: Any
    tokenizer: Any
    draft_tokenizer: Any
    report: PairReport

    @staticmethod
    @pinned()
    def load(
        target: str | Path, draft: str | Path | None = None, *, translate: bool = False,
        shelf: MutableMapping[str, Any] | None = None, **options: Any,
    ) -> LoadedPair:  # fmt: skip
        """Load a target and perhaps a draft; options are the fields of `specdec.PairConfig`.

        translate: the vocabularies may differ, because the draft is translated through text
        shelf: models of earlier pairs, by what they were loaded from: they are used again, and new ones are added
        Raises SpecdecError for all that the report refuses, before a weight is loaded.
        """
        config = pair_config(target, draft, options)
        plans, tokenizers, report = _plan_pair(config, translate)
        models = [plan.model() if shelf is None else plan.shared(shelf) for plan in plans]
        names = ((config.target, config.revision), (config.draft, config.draft_revision))
        for model, (name, revision) in zip(models, names, strict=False):
            note_name(model, name, revision)
        both = len(models) == 2
        return LoadedPair(
            models[0], models[1] if both else None, tokenizers[0], tokenizers[1] if both else None, report
        )


def load_pair(target: str | Path, draft: str | Path | None = None, **options: Any) -> LoadedPair:
    """Load a pair: `LoadedPair.load` as a function."""
    return LoadedPair.load(target, draft, **options)


def inspect_pair(
    target: str | Path, draft: str | Path | None = None, *, translate: bool = False, **options: Any
) -> PairReport:
    """Make the report of a pair from its configs and tokenizers alone. Raises what `LoadedPair.load` would raise."""
    return _plan_pair(pair_config(target, draft, options), translate)[2]


def load_tokenizer(name: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a hub id, a folder, a GGUF file, or the embedded models (`demo`). Raises SpecdecError."""
    source = Source.parse("demo-target" if str(name) == "demo" else name)
    options = {"trust_remote_code": trust_remote_code, **({"revision": revision} if revision else {})}
    return _tokenizer_of(source, {**options, **source.arguments})


def _tokenizer_of(source: Source, options: Mapping[str, Any]) -> Any:
    with loading(f"tokenizer of {source}", lambda error: source.fault("tokenizer", error)):
        made = AutoTokenizer.from_pretrained(source.path, **options)
        made("")  # some bad settings show only in use
        return made


def pair_config(target: str | Path, draft: str | Path | None, options: Mapping[str, Any]) -> PairConfig:
    """Make a PairConfig of loading options. Raises SpecdecError for an unknown name."""
    return from_dict(PairConfig, {"target": target, "draft": draft, **options}, "the loading options")


def _plan_pair(config: PairConfig, translate: bool) -> tuple[list[_Plan], list[Any], PairReport]:
    """Return plans and tokenizers of the models, target first, and the pair's report. Loads no weights."""
    check_attention(config.attn_implementation)
    roles = ("target",) if config.draft is None else ("target", "draft")
    plans = [_Plan.make(config, role) for role in roles]
    report = PairReport.make([plan.facts for plan in plans])
    report.kept_in = kv_dtype(config.kv_cache_dtype)
    tokenizers = [plan.tokenizer() for plan in plans]
    if config.draft is not None:
        report.compare(tokenizers[0], tokenizers[1], translate)
    return plans, tokenizers, report


@dataclass
class _Plan:
    """One model that is about to be loaded, described from its config alone."""

    source: Source
    common: dict[str, Any]
    config: Any
    device: torch.device
    dtype: Any
    extra: dict[str, Any]
    facts: ModelFacts
    adapters: dict[str, Any]

    @staticmethod
    def make(pair: PairConfig, role: str) -> _Plan:
        """The plan for the pair's target or draft, which runs beside the target unless a device is named."""
        prefix = "" if role == "target" else "draft_"
        names = ("device", "dtype", "revision", "quantization_config")
        device, dtype, revision, quantization = (getattr(pair, prefix + name) for name in names)
        name, device = getattr(pair, role), _place(pair, device, role)
        source = Source.parse(name)
        common = {"trust_remote_code": pair.trust_remote_code, **({"revision": revision} if revision else {})}
        common |= source.arguments
        where = f"{role} {name}"
        if source.folder is not None and not source.gguf:
            try:
                check_folder(source.folder)
            except SpecdecError as error:
                raise SpecdecError(f"cannot load {where}: {error}") from None
        with loading(where, lambda error: source.fault("config", error)):
            config = AutoConfig.from_pretrained(source.path, **common)
        check_model_kind(config, role)
        chosen = _choose_dtype(dtype, config, device, role)
        extra: dict[str, Any] = {}
        if role == "target" and pair.device_map is not None:
            extra["device_map"] = pair.device_map
        if role == "target" and pair.tp_plan is not None:
            extra |= loading_options(pair.tp_plan, config, where)
        if source.gguf and quantization is None:
            quantization = _dequantize(str(name))
        if quantization is not None:
            extra["quantization_config"] = quantization
        facts = ModelFacts.from_config(role, str(name), config, chosen, str(device))
        adapters = adapter_folders(getattr(pair, prefix + "adapters"), role)
        return _Plan(source, common, config, device, chosen, extra, facts, adapters)

    @property
    def key(self) -> str:
        """Everything that the loaded model depends on."""
        return repr((str(self.source), self.common, str(self.device), self.dtype, self.extra, self.adapters))

    def shared(self, shelf: MutableMapping[str, Any]) -> Any:
        """Return the model from the shelf; load it onto the shelf if it is missing."""
        if self.key not in shelf:
            shelf[self.key] = self.model()
        return shelf[self.key]

    def tokenizer(self) -> Any:
        return _tokenizer_of(self.source, self.common)

    def model(self) -> Any:
        with explaining(self.device, self._what_would_fit):
            with loading(str(self.source), self._fault), self._bars():
                model, found = AutoModelForCausalLM.from_pretrained(
                    self.source.path, dtype=self.dtype or "auto", output_loading_info=True, **self.common, **self.extra
                )
            self._check_complete(found)
            if self.facts.role == "draft":  # a target says at its first pass that its logits are not finite
                check_finite(model.named_parameters(), f"cannot load {self.source}")
            spread = self.extra.keys() & {"device_map", "distributed_config"}
            if not spread and getattr(model, "hf_device_map", None) is None:
                model = model.to(self.device)
            wrapper = None
            for name, folder in self.adapters.items():
                with loading(f"adapter {name!r} from {folder}", lambda error: None):
                    wrapper = load_adapter(model, str(expanded(as_path(str(folder), "the adapter"))), name, wrapper)
            return model.eval()

    def _bars(self) -> AbstractContextManager[None]:
        """transformers' bar while weights are loaded; none for the embedded models, which are there at once."""
        return without_bars() if self.source.path in {str(path()) for path in EMBEDDED.values()} else nullcontext()

    def _what_would_fit(self, asked: int | None, free: int | None) -> str:
        """What to do where the weights did not."""
        facts, prefix = self.facts, "" if self.facts.role == "target" else "draft_"
        ways = [f"{prefix}quantization_config", "a smaller model"]
        if self.dtype in (None, torch.float32):
            ways.insert(0, f'{prefix}dtype="bfloat16", {size(2 * facts.parameters)}')
        if self.device.type == "cuda":
            ways.append('device_map="auto"' if not prefix else 'draft_device="cpu"')
        return (
            f"the weights of {facts.role} {facts.name} take {size(facts.weight_bytes)} in {facts.dtype}. "
            f"What takes less: {', '.join(ways)}"
        )

    def _fault(self, error: BaseException) -> str | None:
        found = self.source.fault("weights", error)
        if found is None and self.source.folder is not None and not self.source.gguf:
            with torch.device("meta"):
                return fault_of_shapes(self.source.folder, AutoModelForCausalLM.from_config(self.config))
        return found

    def _check_complete(self, found: Mapping[str, Any]) -> None:
        """Raise SpecdecError if the checkpoint lacks weights: a library would make them at random and only warn.

        Quantised checkpoints have weights of other names.
        """
        missing = sorted(found["missing_keys"])
        quantised = "quantization_config" in self.extra or getattr(self.config, "quantization_config", None) is not None
        if missing and not quantised:
            raise SpecdecError(
                f"cannot load {self.source}: the checkpoint lacks weights that its config asks for, "
                f"{len(missing)} of them, {missing[0]} first"
            )


def _place(pair: PairConfig, device: Any, role: str) -> torch.device:
    """Pick the device of the pair's target or draft; `device` is what its own option says."""
    if pair.tp_plan is None:
        return pick_device(pair.device if device is None else device)
    for name in ("device", "device_map"):
        if getattr(pair, name) is not None:
            raise SpecdecError(f"{name} does not go with tp_plan: each process takes the GPU of its own rank")
    return pick_device(device) if role == "draft" and device is not None else own_device()


@contextmanager
def loading(what: str, fault: Callable[[BaseException], str | None]) -> Iterator[None]:
    """Turn failures of a transformers loader into one line that names the thing and the file to blame.

    fault: finds that file; AssertionErrors are mistakes in code, and pass
    """
    try:
        yield
    except (AssertionError, SpecdecError):
        raise
    except BaseException as error:
        # A tokenizer that panics does not raise an Exception.
        if is_out_of_memory(error) or (not isinstance(error, Exception) and type(error).__name__ != "PanicException"):
            raise
        raise SpecdecError(f"cannot load {what}: {fault(error) or said(error)}") from error


def _dequantize(name: str) -> Any:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise SpecdecError(f"reading {name} needs the package gguf: install specdec[gguf]") from None
    from transformers import GgufConfig

    return GgufConfig(dequantize=True)


def pick_device(device: str | torch.device | None) -> torch.device:
    """Pick a device; None = CUDA if there is one, else CPU. Raises SpecdecError for one that is absent or untested."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = parse_device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise SpecdecError(f"device {device!r} was asked for, but this machine has no CUDA device")
    return chosen


def parse_device(device: Any) -> torch.device:
    """Parse a device's name, without asking for the device. Raises SpecdecError for an unsupported kind."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise SpecdecError(f"unknown device {device!r}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise SpecdecError(f"device {device!r} is not supported: cpu and cuda are (mps is untested)")
    return chosen


def check_dtype(dtype: Any, name: str = "dtype") -> torch.dtype | None:
    """Return a dtype of weights, given or by name; None for None and "auto". Raises SpecdecError for anything else."""
    if dtype is None or dtype == "auto":
        return None
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point or chosen.itemsize < 2:
        raise SpecdecError(f"unknown {name} {dtype!r}: float32, bfloat16 and float16 are known")
    return chosen


def _choose_dtype(dtype: Any, config: Any, device: torch.device, role: str) -> torch.dtype | None:
    """Choose the dtype of weights; None = the checkpoint's."""
    chosen = check_dtype(dtype, "dtype" if role == "target" else "draft_dtype")
    if chosen is not None:
        return chosen
    if device.type == "cpu" and dtype is None:
        return torch.float32
    stored = getattr(config, "dtype", None)
    if role == "draft" and dtype is None and stored in (None, torch.float32):
        return torch.bfloat16
    return stored if isinstance(stored, torch.dtype) else None


def check_is_model(model: Any, role: str) -> None:
    """Raise SpecdecError for anything but a model, such as a name."""
    if not hasattr(model, "config") or not callable(getattr(model, "forward", None)):
        raise SpecdecError(
            f"the {role} must be a transformers model, got {model!r:.60}: names and folders go to from_pretrained"
        )


def check_weights(model: Any, role: str) -> None:
    """Raise SpecdecError for weights without data."""
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if absent:
        raise SpecdecError(
            f"{role} ({model.config.model_type}) has {len(absent)} parameters without data (on the meta device: "
            f"{absent[0]}, ...), because they are offloaded or were never loaded; load the whole model onto its devices"
        )


def check_model_kind(config: Any, role: str, in_hand: bool = False) -> None:
    """Raise SpecdecError for what the engine cannot run.

    in_hand: the model is there, so transformers need not know its type
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise SpecdecError(f"{role} ({kind}) is an encoder-decoder model: only decoder-only models are supported")
    if any(hasattr(config, name) for name in ("vision_config", "audio_config")):
        raise SpecdecError(f"{role} ({kind}) takes images or audio: only text models are supported")
    if not in_hand and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not getattr(config, "auto_map", None):
        raise SpecdecError(f"{role} ({kind}) is not a causal language model that transformers knows")
    text = config.get_text_config()
    if kind in OWN_STATES:
        raise SpecdecError(_own_states(role, kind))
    if getattr(text, "alibi", False) is True:
        raise SpecdecError(
            f"{role} ({kind}) has ALiBi in a form that counts distances in an attention mask with one length for all "
            "rows: not supported; BLOOM, MPT, and Falcon with rotary positions (alibi=False) work"
        )
    if "chunked_attention" in layer_kinds(text):
        raise SpecdecError(f"{role} ({kind}) uses chunked attention: not supported")
    for name in ("num_hidden_layers", "num_attention_heads"):
        if not _has(text, name) and not (name == "num_attention_heads" and is_recurrent(text)):
            raise SpecdecError(f"{role} ({kind}) says no {name} in its configuration: it is no single stack of layers")
    if any("dynamic" in rope_type(settings) for settings in rope_settings(text)):
        raise SpecdecError(
            f"{role} ({kind}) has dynamic RoPE, whose factors grow with the longest text of a pass: a row would depend "
            "on its neighbours; not supported"
        )
    switch_position(text, role)


def _own_states(role: str, kind: str) -> str:
    return (
        f"{role} ({kind}) keeps the states of its recurrent layers in a place of its own, where rejected tokens cannot "
        "be taken back; recurrent layers work if their states are in transformers' cache (docs/models.md)"
    )


def _has(config: Any, name: str) -> bool:
    """True if a config has a field, also one that differs from layer to layer."""
    try:
        return hasattr(config, name)
    except RuntimeError:
        return True


def check_modules(target: Any, draft: Any, tokenizer: Any, draft_tokenizer: Any, translate: bool) -> PairReport:
    """Make the pair report of models in hand. Raises SpecdecError for pairs and models that cannot work."""
    facts = []
    for role, model in (("target", target), ("draft", draft)):
        if model is None:
            continue
        if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
            raise SpecdecError(f"{role} ({type(model).__name__}) has no language-model head")
        check_weights(model, role)
        check_activations(model, role)
        if is_recurrent(model.config.get_text_config()) and Recurrence.of(model) is None:
            raise SpecdecError(_own_states(role, model.config.model_type))
        facts.append(ModelFacts.from_module(role, model))
    report = PairReport.make(facts)
    if draft is not None:
        report.compare(tokenizer, draft_tokenizer, translate)
    return report
