"""Options that several verbs have, in groups: a parameter of a verb that is a group becomes one option per field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from specdec.cli.inputs import check_names, given, named_prompts, refuse_beside, with_extra
from specdec.errors import SpecdecError
from specdec.files.texts import model_path

if TYPE_CHECKING:
    from specdec.research.prompts.datasets import Prompt

AsJson = Annotated[bool, Option("--json", help="Print one JSON document.")]
KvCacheDtype = Annotated[str | None, Option(help="fp8 or fp8_e5m2 = keys and values in 8 bits.")]
DropLoops = Annotated[bool, Option("--drop-loops", help="Leave texts that repeat one piece to their end out.")]
Texts = list[str] | None
# What --dataset takes: docs/datasets.md.
SETS = "spec-bench, humaneval, gsm8k; a JSON-lines, chat or text file; or hf:owner/name."
PROMPT_FILE = "A .txt file is one prompt, a .jsonl or .json file a set of them; - = standard input, one prompt."
STRATEGIES = "Strategies in order of priority, a,b:key=value; none = plain decoding."
ACCEPTANCE = "leviathan, match, coupled, or a rule of your own as module:name."
CHAT = "Whether prompts go through the chat template. Default: chats do, and texts do not."


@dataclass(frozen=True)
class Group:
    """Options that belong together."""

    def given(self) -> dict[str, Any]:
        """The options that are on the command line."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Pair(Group):
    """Two models, and where they run."""

    target: Annotated[str | None, Option(help="Hub id, folder, GGUF file, or demo-target.")] = None
    draft: Annotated[str | None, Option(help="The same for the draft, or demo-draft.")] = None
    device: Annotated[str | None, Option(help="cpu or cuda[:n].")] = None
    dtype: Annotated[str | None, Option(help="float32, bfloat16 or float16.")] = None
    kv_cache_dtype: KvCacheDtype = None

    def __post_init__(self) -> None:
        for name in (self.target, self.draft):
            if name:
                model_path(name)


@dataclass(frozen=True)
class Models(Pair):
    """Which models, where and how they are loaded: fields of PairConfig."""

    draft_device: Annotated[str | None, Option(help="The draft's device.")] = None
    draft_dtype: Annotated[str | None, Option(help="The draft's dtype.")] = None
    device_map: Annotated[str | None, Option(help="auto = spread the target's layers over the GPUs.")] = None
    tp_plan: Annotated[str | None, Option(help="auto = spread each layer over torchrun's processes.")] = None
    revision: Annotated[str | None, Option(help="The target's revision on the hub.")] = None
    draft_revision: Annotated[str | None, Option(help="The draft's revision on the hub.")] = None
    trust_remote_code: Annotated[bool | None, Option("--trust-remote-code", help="Run a model's own code.")] = None


@dataclass(frozen=True)
class Generation(Group):
    """How text is generated."""

    max_new_tokens: Annotated[int | None, Option(help="Most tokens to generate for a prompt.")] = None
    temperature: Annotated[float | None, Option(help="0 = greedy.")] = None
    seed: Annotated[int | None, Option(help="Row i is keyed (seed, i).")] = None
    acceptance: Annotated[str | None, Option(help=ACCEPTANCE)] = None
    option: Annotated[Texts, Option(help="Any other generation option, as name=value; repeat for more.")] = None

    def settings(self) -> dict[str, Any]:
        """The options as `generate` names them. Raises SpecdecError for one that is given twice or unknown."""
        options = self.given()
        return with_extra(options, options.pop("option", []))


@dataclass(frozen=True)
class AllGeneration(Generation):
    """The same with the options that are used most by their own names."""

    top_k: Annotated[int | None, Option(help="0 = off.")] = None
    top_p: Annotated[float | None, Option(help="In (0, 1].")] = None
    min_p: Annotated[float | None, Option(help="In [0, 1].")] = None
    repetition_penalty: Annotated[float | None, Option(help="1 = off.")] = None
    stop_strings: Annotated[Texts, Option("--stop", help="Stop string; repeat for more.")] = None
    ignore_eos: Annotated[bool | None, Option("--ignore-eos", help="Continue after an end token.")] = None
    batch_size: Annotated[int | None, Option(help="Rows in one pass.")] = None
    num_return_sequences: Annotated[int | None, Option(help="Texts for each prompt.")] = None


@dataclass(frozen=True)
class Prompts(Group):
    """Prompts that are typed or in files."""

    prompt: Annotated[Texts, Option(help="Text to continue; repeat for more.")] = None
    prompt_file: Annotated[list[Path] | None, Option(help=PROMPT_FILE)] = None

    def read(self) -> list[Prompt]:
        """The prompts, those of sets last. Raises SpecdecError for what cannot be read."""
        return named_prompts(self.prompt or [], self.prompt_file or [])

    def texts(self) -> list[str]:
        """The same for verbs that take no chats. Raises SpecdecError for a chat."""
        found = self.read()
        chat = next((p for p in found if p.messages), None)
        if chat is not None:
            raise SpecdecError(f"--prompt-file: {chat.id} is a chat, and this verb takes texts: use specdec generate")
        return [p.text for p in found]

    def entries(self) -> list[Any]:
        """The same as an ablation has them: texts, and records of the prompts of sets."""
        return [p.record() if p.category else p.text for p in self.read()]


@dataclass(frozen=True)
class SetPrompts(Prompts):
    """Prompts that are typed, in files, or those of a set."""

    dataset: Annotated[str | None, Option(help=SETS)] = None
    category: Annotated[Texts, Option(help="Only this category of the set; repeat for more.")] = None
    limit: Annotated[int | None, Option(min=1, help="Most prompts of the set, spread over categories.")] = None
    longest: Annotated[int | None, Option(min=1, help="Cut prompts to this many tokens.")] = None

    def read(self) -> list[Prompt]:
        """The prompts, those of the set last. Raises SpecdecError for what cannot be read."""
        found = super().read()
        if self.dataset is None:
            refuse_beside("prompts that are no set: --dataset", given(category=self.category, limit=self.limit))
            return found
        from specdec.research.prompts.datasets import load_prompts

        return found + load_prompts(self.dataset, self.category, self.limit)


@dataclass(frozen=True)
class Run(Group):
    """A run as a file, and its strategies."""

    config: Annotated[Path | None, Option(help="A run as a YAML file; other options override it.")] = None
    strategies: Annotated[str | None, Option(help=STRATEGIES)] = None

    def __post_init__(self) -> None:
        check_names(self.strategies or "")


def with_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb one option for each field of its groups."""
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, Group)}
    flat: list[Parameter] = []
    for parameter in signature(verb).parameters.values():
        kind = groups.get(parameter.name)
        if kind is None:
            flat.append(parameter.replace(annotation=hints[parameter.name], kind=Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(kind, include_extras=True)
        flat += [
            Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name]) for f in fields(kind)
        ]

    @wraps(verb)
    def run(**options: Any) -> None:
        made = {name: kind(**{f.name: options.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        verb(**made, **options)

    vars(run).update(__signature__=Signature(flat), __annotations__={p.name: p.annotation for p in flat})
    return run
