"""From what users type to configs: chains, prompts, generation options, runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecdecError, unknown_name
from specdec.files.fields import STRATEGY_NAMES
from specdec.files.own_code import parse_name, split_list
from specdec.files.texts import check_readable, expanded, parse_yaml, read_text

if TYPE_CHECKING:
    from specdec.config import RunConfig
    from specdec.research.prompts.datasets import Given, Prompt


def given(**options: Any) -> dict[str, Any]:
    """The options that are on the command line: those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def refuse_beside(what: str, options: Mapping[str, Any]) -> None:
    """Raise SpecdecError for an option that has no effect beside `what`."""
    for name in options:
        raise SpecdecError(f"--{name.replace('_', '-')} has no effect beside {what}")


def check_names(strategies: str) -> None:
    """Raise SpecdecError for an unknown name now, and not seconds later, when the strategies themselves are loaded."""
    if "specdec.drafters" in sys.modules:  # which knows those of one's own too
        return
    for part in split_list(strategies):
        name, _ = parse_name(part, STRATEGY_NAMES, "strategy")
        if ":" not in name and name not in (*STRATEGY_NAMES, "none"):
            raise unknown_name("strategy", name, STRATEGY_NAMES)


def chain(
    text: str | None, translate: bool = False, has_draft: bool = True, known: Sequence[Any] | None = None
) -> tuple[Any, ...] | None:
    """The chain that was typed, else the known one; `none` = plain decoding. translate: set it on the draft models.

    Raises SpecdecError for an unknown strategy or option.
    """
    from specdec.drafters import make_drafters
    from specdec.drafters.options import check_effects

    if text is None and not translate:
        return None if known is None else tuple(known)
    given_chain = (None if known is None else list(known)) if text is None else text
    drafters = [] if text is not None and text.strip() == "none" else make_drafters(given_chain, has_draft)
    if translate:
        models = [d for d in drafters if d.uses_draft_model]
        if not models:
            raise SpecdecError("--translate needs the strategy draft-model and a draft model: give --draft")
        for model in models:
            model.translate = model.translate or True
            check_effects(model)
    return tuple(drafters)


def base_run(config: Path | None, models: Mapping[str, Any]) -> RunConfig:
    """The run of a config file, or a new one, with these models. Raises SpecdecError without a target."""
    from specdec.config import PairConfig, RunConfig, load_yaml

    if config is not None:
        run: RunConfig = load_yaml(config)
        return replace(run, pair=replace(run.pair, **models))
    if "target" not in models:
        raise SpecdecError("no target: give --target, or --config with a pair")
    return RunConfig(PairConfig(**models))


def make_run(
    base: RunConfig, options: Mapping[str, Any], strategies: str | None, prompts: Sequence[str], translate: bool = False
) -> RunConfig:
    """The run with what was typed in place of its own. Raises SpecdecError before any model is loaded."""
    asked = tuple(prompts) or base.prompts
    if not asked:
        raise SpecdecError("no prompt: give --prompt, --prompt-file or --dataset")
    return replace(with_options(base, options, strategies, translate), prompts=asked)


def with_options(
    base: RunConfig, options: Mapping[str, Any], strategies: str | None, translate: bool = False
) -> RunConfig:
    """The same for a run that needs no prompts. Raises SpecdecError."""
    from specdec.decoding.validation import check_chain, check_generation, check_loading

    check_loading(base.pair)
    generation = {**base.generation, **options}
    settings = check_generation(generation)
    has_draft = base.pair.draft is not None
    chosen = chain(strategies, translate, has_draft, base.strategies)
    if chosen is not None:
        check_chain(chosen, has_draft, settings)
    return replace(base, generation=generation, strategies=chosen)


def named_prompts(texts: Sequence[str], files: Sequence[Path] = ()) -> list[Prompt]:
    """Texts as typed, then the prompts of files: a text file is one, a JSON-lines or JSON file a set.

    Raises SpecdecError for what cannot be read.
    """
    if not texts and not files:
        return []
    # One with options behind its name is the set's reader's to find.
    check_readable(*(expanded(f) for f in files if str(f) != "-" and ":" not in str(f)), what="prompt file")
    from specdec.research.prompts.datasets import Prompt, load_prompts
    from specdec.research.prompts.sources import ARRAY, LINES, Source

    found: list[Prompt] = []
    sets: list[Prompt] = []
    for file in files:
        if Path(Source.parse(str(file)).place).suffix.lower() in (*LINES, ARRAY):
            sets += load_prompts(file)
        else:
            texts = [*texts, _read(file)]
    for i, text in enumerate(texts):
        found.append(Prompt(f"prompt {i}", "", text, (text,)))
    return found + sets


def as_prompts(prompts: Sequence[Prompt], tokenizer: Any, chat: bool | None, longest: int | None = None) -> list[Given]:
    """Prompts as `generate` takes them; chat: through the chat template or not, None = chats are and texts are not;
    longest: tokens to which they are cut."""
    from specdec.research.prompts.datasets import Given, as_given

    ways = [("auto" if p.messages else False) if chat is None else chat for p in prompts]
    return [Given(p.id, as_given(p, tokenizer, way, longest)) for p, way in zip(prompts, ways, strict=True)]


def read_prompts(prompts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Prompts as typed, then one from each file; `-` is standard input. Raises SpecdecError for what cannot be read."""
    return [*prompts, *(_read(file) for file in files)]


def _read(file: Path) -> str:
    if str(file) != "-":
        return read_text(file, "prompt file")
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise SpecdecError(f"standard input cannot be read as UTF-8 text: {error}") from None


def with_extra(options: Mapping[str, Any], pairs: Sequence[str]) -> dict[str, Any]:
    """Add the options of `--option name=value`, with values as YAML reads them.

    Raises SpecdecError for one that was given both ways, and for one that does not exist.
    """
    from specdec.config import GenerationSettings

    made = dict(options)
    for pair in pairs:
        name, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not name:
            raise SpecdecError(f"--option: expected name=value, got {pair!r}")
        if name in options:
            raise SpecdecError(f"--option {name}: --{name.replace('_', '-')} says it already")
        made[name] = parse_yaml(value, f"--option {name}: the value {value!r}")
    GenerationSettings.parse(made)
    return made
