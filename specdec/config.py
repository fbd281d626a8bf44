"""Configuration: frozen dataclasses, strict checks, YAML in and out. Unknown keys are errors.

`GenerationSettings` is everything that `generate`, `stream` and `rounds` accept, prompts apart. `RunConfig` is a whole
run as a file (configs/demo.yaml); every field there is a field here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from specdec.errors import SpecdecError, unknown_name
from specdec.files.fields import OWN_FIELDS, TEXT_FIELDS, WARPER_FIELDS, WIDEST, is_tensor
from specdec.files.forms import MOST
from specdec.files.own_code import search_folder
from specdec.files.texts import dump_yaml_text, read_yaml


class _Unset:
    """The default of arguments whose `None` means something ("no end-of-sequence token", "no strategies")."""

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False

    def __copy__(self) -> _Unset:
        return self

    def __deepcopy__(self, memo: Any) -> _Unset:
        return self


UNSET: Any = _Unset()

# Fields of transformers' GenerationConfig that are passed to its processors under their own names.
PROCESSOR_FIELDS = (*TEXT_FIELDS, *WARPER_FIELDS)
_FLAT_FIELDS = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
_ID_FIELDS = ("bad_words_ids", "sequence_bias", *_FLAT_FIELDS)
MOST_ROWS = 1 << 20  # of a prompt; each needs some kilobytes before it is begun
_LEAST = {"max_new_tokens": 0, "top_k": 0, "num_return_sequences": 1, "batch_size": 1, "verify_width": 2}
_MAY_BE_NONE = ("batch_size", "verify_width")
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-30, 1e30),  # scores that are divided by less than this leave float32
    **dict.fromkeys(OWN_FIELDS, (-2.0, 2.0)),
}
_CHOICES = {"order": ("given", "upstream"), "draft_length": ("auto", "given", None)}


@dataclass(frozen=True)
class GenerationSettings:
    """Everything a generation call accepts, prompts apart, by the names of the design's public surface.

    max_new_tokens: most tokens emitted per row.
    acceptance: a rule, or its name: "leviathan", "typical:eps=0.3", "my_module:my_rule".
    seed: int = row i is keyed (seed, i); list = one seed per prompt; None = fresh.
    temperature: 0 = greedy. top_k: 0 = off. top_p: in (0, 1]. min_p: in [0, 1]. repetition_penalty: in [1e-30, 1e30].
    presence_penalty, frequency_penalty: in [-2, 2], OpenAI's, over generated ids.
    eos_token_id: UNSET = the model's; None = none; int or list.
    logits_processor: transformers' processors, callables, or `specdec.sampling.constraints`.
    batch_size: rows in one pass; None = all prompts, up to 8.
    keep_state: reuse the K/V of earlier rows that a prompt extends.
    verify_width: tokens of a row, at least, that a verify pass takes, the newest included (None: 17 on a CPU, 16 on a
        GPU, or as many as a strategy's trees need); longer chains go in chunks. Exact mode has one width of its own.
    length_policy: how long drafts are, in place of draft_length: a name of docs/automatic_length.md, with options
        ("heuristic:start=3"), "my_module:Name", or a `specdec.LengthPolicy`.
    shard: "0/4" = only the first, fifth, ... prompt, with the tokens that they have in the whole call; None = all.
    adapter, draft_adapter: names of PEFT adapters of the target and of the draft; None = none, UNSET = as the models
        are set.
    processors: other GenerationConfig fields by name.
    """

    max_new_tokens: int = 128
    acceptance: Any = "leviathan"
    seed: Any = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    eos_token_id: Any = UNSET
    ignore_eos: bool = False
    stop_strings: Any = None
    logits_processor: Any = None
    prefix_allowed_tokens_fn: Any = None
    stopping_criteria: Any = None
    num_return_sequences: int = 1
    exact: Any = UNSET
    output_logprobs: bool | int = False
    batch_size: int | None = None
    keep_state: bool = False
    verify_width: int | None = None
    order: Literal["given", "upstream"] = "given"
    draft_length: Literal["auto", "given"] | None = None
    length_policy: Any = None
    costs: Any = None
    shard: str | None = None
    adapter: Any = UNSET
    draft_adapter: Any = UNSET
    processors: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(arguments: Mapping[str, Any]) -> GenerationSettings:
        """From keyword arguments; an unknown name is an error that suggests the nearest known one."""
        own = {f.name for f in fields(GenerationSettings)} - {"processors"}
        known: dict[str, Any] = {}
        processors: dict[str, Any] = {}
        for name, value in arguments.items():
            if name in own:
                known[name] = value
            elif name in PROCESSOR_FIELDS:
                processors[name] = value
            elif name not in ("num_beams", "num_beam_groups") or value not in (None, 1):
                raise unknown_name("generation option", name, sorted(own | set(PROCESSOR_FIELDS)))
        if known.get("eos_token_id", UNSET) is not UNSET:
            known["eos_token_id"] = plain_ids(known["eos_token_id"])
        for name in set(_FLAT_FIELDS) & set(processors):
            processors[name] = plain_ids(processors[name])
            if name in ("suppress_tokens", "begin_suppress_tokens") and processors[name] in ([], {}):
                processors[name] = None  # nothing to suppress
        settings = GenerationSettings(**known, processors=processors)
        settings.check()
        return settings

    def check(self) -> None:
        """Raise SpecdecError for a value out of range."""
        for name in ("ignore_eos", "keep_state"):
            check_switch(name, getattr(self, name))
        top = self.output_logprobs
        if not isinstance(top, int) or (top < 1 and top is not False):
            raise SpecdecError(
                f"output_logprobs must be true, false, or how many most likely tokens, >= 1; got {top!r}"
            )
        for name, least in _LEAST.items():
            if name not in _MAY_BE_NONE or getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        for name, (low, high) in _RANGES.items():
            check_number(name, getattr(self, name), low, high)
        if self.num_return_sequences > MOST_ROWS:
            raise SpecdecError(f"num_return_sequences must be at most {MOST_ROWS:,}, got {self.num_return_sequences}")
        if self.verify_width is not None and self.verify_width > WIDEST:
            raise SpecdecError(f"verify_width must be at most {WIDEST}, got {self.verify_width}")
        if self.top_p == 0:
            raise SpecdecError("top_p must be in (0, 1], got 0: it would leave no token")
        for name, choices in _CHOICES.items():
            if not isinstance(getattr(self, name), str | None) or getattr(self, name) not in choices:
                raise SpecdecError(f"{name} must be {' or '.join(map(repr, choices))}, got {getattr(self, name)!r}")
        check_exact(self.exact)
        self._check_seed()
        self._check_processors()
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise SpecdecError(f"stop_strings must be non-empty strings, got {text!r}")
        for token in () if self.eos_token_id in (UNSET, None) else as_list(self.eos_token_id):
            check_whole("eos_token_id", token, 0)

    def _check_seed(self) -> None:
        seeds = self.seed if isinstance(self.seed, (list, tuple)) else [self.seed]
        for seed in seeds:
            if seed is not None:
                check_seed(seed, "an int, a list of ints or None")

    def _check_processors(self) -> None:
        """Raise SpecdecError for values out of range that transformers ignores without a word."""
        for name, value in self.processors.items():
            if value is None:
                continue
            if name in ("no_repeat_ngram_size", "min_length", "min_new_tokens"):
                check_whole(name, value, 0, MOST // 2)  # a prompt's length is added to it
            elif name in ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"):
                check_number(name, value, 0.0, 1.0)
            elif name in ("renormalize_logits", "remove_invalid_values"):
                check_switch(name, value)
            elif name in _FLAT_FIELDS:
                _check_flat(name, value)
            elif name == "sequence_bias":
                _check_biases(value)
            elif name == "exponential_decay_length_penalty":
                _check_decay(value)
        for name in ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"):
            for value in as_list(getattr(self, name)):
                if not (callable(value) or (name == "logits_processor" and _is_stateful(value))):
                    raise SpecdecError(f"{name} must be callable, got {value!r}")

    def check_ids(self, vocab_size: int | None = None) -> None:
        """Raise SpecdecError for a token id that the target does not have; vocab_size None: that no target can have."""
        named = {name: self.processors.get(name) for name in _ID_FIELDS}
        if self.eos_token_id is not UNSET:
            named["eos_token_id"] = self.eos_token_id
        for name, value in named.items():
            for token in _ids(value, name):
                if vocab_size is None and token < 0:
                    raise SpecdecError(f"{name}: token ids are 0 or more, got {token}")
                if vocab_size is not None and not 0 <= token < vocab_size:
                    raise SpecdecError(f"{name}: token id {token} is outside the target's vocabulary of {vocab_size}")

    @property
    def stops(self) -> list[Any]:
        """The stop strings as a list."""
        return as_list(self.stop_strings)

    @property
    def fields(self) -> dict[str, Any]:
        """Every processor field that is set, by GenerationConfig's names."""
        named = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        if self.repetition_penalty != 1.0:
            named["repetition_penalty"] = self.repetition_penalty
        return {**named, **{name: getattr(self, name) for name in OWN_FIELDS}, **self.processors}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for provenance; objects by their class names."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True)
class PairConfig:
    """Which models to load, and how.

    target, draft: hub ids, folders, GGUF files, or the embedded `demo-target` / `demo-draft`.
    device: None = CUDA if there is one, else CPU.
    dtype: None = the checkpoint's on a GPU (a draft's: half precision), float32 on a CPU.
    device_map, quantization_config, revision, trust_remote_code: as transformers' `from_pretrained` takes them.
    adapters, draft_adapters: folders of PEFT adapters by name; calls choose them (`adapter=`), none is active before.
    tp_plan: "auto" = spread the target over torchrun's processes (docs/parallel.md).
    attn_implementation: None = specdec's own, or sdpa / eager.
    kv_cache_dtype: None or auto = keys and values in the model's dtype; fp8 (e4m3) or fp8_e5m2 = in 8 bits.
    """

    target: Any
    draft: Any = None
    device: Any = None
    dtype: Any = None
    draft_device: Any = None
    draft_dtype: Any = None
    device_map: Any = None
    tp_plan: Any = None
    attn_implementation: str | None = None
    kv_cache_dtype: str | None = None
    revision: str | None = None
    draft_revision: str | None = None
    quantization_config: Any = None
    draft_quantization_config: Any = None
    adapters: Any = None
    draft_adapters: Any = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class RunConfig:
    """A run as a file.

    pair: the models.
    strategies: names, or mappings with `name` and the strategy's parameters; None = the default chain.
    generation: keyword arguments of `generate`.
    prompts: texts.
    """

    pair: PairConfig
    strategies: tuple[Any, ...] | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[str, ...] = ()


T = TypeVar("T")


def from_dict(cls: type[T], data: Any, where: str) -> T:
    """Build a dataclass from a mapping; `where` names the place in error messages."""
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else type(data).__name__
        raise SpecdecError(f"{where}: expected a mapping of options, got {found}")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for name, entry in known.items():
        if name not in data and entry.default is MISSING and entry.default_factory is MISSING:
            raise SpecdecError(f"{where}: {name} is missing")
    values: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for name, value in data.items():
        if name not in known:
            raise unknown_name(f"option in {where}", str(name), sorted(known))
        values[name] = _part(hints[name], value, f"{where}.{name}")
    try:
        return cls(**values)
    except TypeError as error:
        raise SpecdecError(f"{where}: {error}") from None


def _part(kind: Any, value: Any, where: str) -> Any:
    """A field's value in the form of its type: a dataclass, one or None, a mapping of names to such, or anything else,
    with tuples for lists."""
    arguments = get_args(kind)
    if get_origin(kind) is Mapping and is_dataclass(arguments[1]):
        if not isinstance(value, Mapping):
            raise SpecdecError(f"{where}: expected a mapping of names, got {type(value).__name__}")
        return {str(name): _part(arguments[1], part, f"{where}.{name}") for name, part in value.items()}
    part = next((one for one in (kind, *arguments) if is_dataclass(one)), None)
    if part is None or (value is None and part is not kind):
        return tuple(value) if isinstance(value, list) else value
    return value if isinstance(value, part) else from_dict(part, {} if value is None else value, where)  # type: ignore[arg-type]


def load_yaml(path: str | Path, cls: type[T] = RunConfig, **changes: Any) -> T:  # type: ignore[assignment]
    """Read a config file as a dataclass, and search its folder for modules that are named in it. changes: fields that
    are to have other values than the file says, or that it leaves out.

    Raises SpecdecError for a missing or malformed file or an unknown key.
    """
    data, name = read_yaml(path, "config file"), Path(path).name
    search_folder(Path(path).parent)
    config = from_dict(cls, {**data, **changes} if isinstance(data, Mapping) else data, name)
    if isinstance(config, RunConfig):
        _check_run(config, name)
    return config


def _check_run(config: RunConfig, where: str) -> None:
    """Raise SpecdecError for a part of a run that has the wrong form."""
    if not isinstance(config.generation, Mapping):
        raise SpecdecError(f"{where}: generation must be a mapping of options, got {config.generation!r}")
    if not (config.strategies is None or isinstance(config.strategies, tuple)):
        raise SpecdecError(f"{where}: strategies must be a list or null, got {config.strategies!r}")
    if not isinstance(config.prompts, tuple) or not all(isinstance(p, str) for p in config.prompts):
        raise SpecdecError(f"{where}: prompts must be a list of texts, got {_lists(config.prompts)!r}")
    GenerationSettings.parse(config.generation)


def dump_yaml(config: Any) -> str:
    """A dataclass as YAML that `load_yaml` reads back to an equal object."""
    return dump_yaml_text(_lists(asdict(config)))


def _ids(value: Any, name: str) -> list[int]:
    """Every token id in a processor field, however nested; of a sequence bias only the ids, not the biases."""
    if isinstance(value, Mapping):
        value = list(value)
    elif name == "sequence_bias" and isinstance(value, (list, tuple)):
        value = [pair[0] for pair in value if isinstance(pair, (list, tuple)) and pair]
    return _flattened(value, name)


def _flattened(value: Any, name: str) -> list[int]:
    if value is None:
        return []
    if isinstance(value, Integral) and not isinstance(value, bool):
        return [int(value)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [token for part in value for token in _flattened(part, name)]
    raise SpecdecError(f"{name}: expected token ids, got {value!r}")


def _is_stateful(value: Any) -> bool:
    from specdec.sampling.constraints import PrefixProcessor

    return isinstance(value, PrefixProcessor)


def plain_ids(value: Any) -> Any:
    """Token ids - one, or a list, set, range, array or tensor of them - as an int or a list of ints. Everything else is
    returned as it is, to be refused."""
    if isinstance(value, np.ndarray) or is_tensor(value):
        return value.tolist()
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain_ids(part) for part in value]
    return int(value) if isinstance(value, np.integer) else value


def _check_flat(name: str, value: Any) -> None:
    """Raise SpecdecError unless `value` is a list of token ids, or where one is forced, an id or some."""
    forced = name.startswith("forced")
    entries = [value] if forced and not isinstance(value, list) else value
    sound = isinstance(entries, list) and all(isinstance(t, Integral) and not isinstance(t, bool) for t in entries)
    if not sound or (forced and not entries):
        form = "a token id or a list of token ids" if forced else "a list of token ids"
        raise SpecdecError(f"{name}: expected {form}, got {value!r}")


def _check_biases(value: Any) -> None:
    """Raise SpecdecError for biases that leave no distribution; their form is transformers' to check."""
    pairs = value.items() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for pair in pairs:
        bias = pair[1] if isinstance(pair, list | tuple) and len(pair) > 1 else 0.0
        if isinstance(bias, int | float) and not bias <= np.finfo(np.float32).max:
            raise SpecdecError(f"sequence_bias: a bias must be a number of float32 or -inf, got {bias!r}")


def _check_decay(value: Any) -> None:
    """Raise SpecdecError unless `value` is a start, in tokens, and a factor."""
    numbers = plain_ids(value)
    if isinstance(numbers, list) and len(numbers) > 1:
        with suppress(SpecdecError):
            for number in numbers[:2]:
                check_number("", number, -sys.float_info.max, math.inf)
            return
    raise SpecdecError(f"exponential_decay_length_penalty={value!r}: it must be (start, factor), two numbers")


def as_list(value: Any) -> list[Any]:
    """None = nothing, one value = a list of it."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def check_exact(value: Any) -> None:
    """Raise SpecdecError for a value that `exact` cannot have."""
    if not (value is UNSET or isinstance(value, bool) or (isinstance(value, str) and value == "auto")):
        raise SpecdecError(f"exact must be True, False or 'auto', got {value!r}")


def check_seed(value: Any, form: str) -> None:
    """Raise SpecdecError unless `value` is one seed. form: what the message asks for"""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise SpecdecError(f"seed must be {form}, got {value!r}")


def check_whole(name: str, value: Any, least: int, most: int = MOST) -> None:
    """Raise SpecdecError unless `value` is a whole number from `least` to `most`; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecdecError(f"{name} must be a whole number >= {least}, got {value!r}")
    if value > most:
        raise SpecdecError(f"{name}={value} is above the limit of {most}")


def check_switch(name: str, value: Any) -> None:
    """Raise SpecdecError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise SpecdecError(f"{name} must be True or False, got {value!r}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise SpecdecError unless `value` is a finite number in [low, high]; a bool is none, and NaN is in no range."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= min(high, sys.float_info.max):
        bounds = f">= {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise SpecdecError(f"{name} must be a number {bounds}, got {value!r}")


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    if value is UNSET:
        return "unset"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_plain(v) for v in value]
    if is_dataclass(value) and hasattr(value, "name"):
        return str(value.name)
    return type(value).__name__
