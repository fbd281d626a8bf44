"""What a chain is in the options of vLLM, SGLang and llama.cpp, and what has no counterpart there.

Nothing is loaded, heads neither. files/engines.py has the engines' names, and says which versions they are from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.config import UNSET, GenerationSettings, PairConfig, RunConfig, check_whole
from specdec.decoding.acceptance import find_rule
from specdec.drafters import find_strategy, make_drafters, parse_strategy
from specdec.drafters.best_tree import TreeSize
from specdec.drafters.chain import UPSTREAM_ORDER
from specdec.drafters.draft_model.strategy import DEFAULTS
from specdec.drafters.eagle3.auto_tree import MOST
from specdec.drafters.tree_plan import parse_opt, parse_plan
from specdec.errors import SpecdecError, unknown_name
from specdec.files.engines import ENGINES, Engine
from specdec.files.own_code import parameters

UNKNOWN = "no counterpart known"
EMBEDDED = ("demo-target", "demo-draft", "demo-head")
HEADS = ("eagle3", "dflash")  # making one of these reads its weights
FILES = ("static", "dynamic")
SAMPLE = ("draft-model", "eagle3", "dflash", "mtp")  # drafts with a q
UNSERVED = ("length_policy", "costs", "verify_width", "exact", "keep_state")  # options of a call
Values = dict[str, Any]


@dataclass
class Strategy:
    """A strategy of the chain.

    values: all options that have an effect; changed: those off their default
    """

    name: str
    values: Values
    changed: set[str]
    automatic: bool = False

    @property
    def model(self) -> Any:
        return self.values.get("head") or self.values.get("draft")


def _way_out(embedded: str, llama: bool) -> str:
    """How another engine gets an embedded model."""
    if embedded == "demo-head":
        return "specdec export-head demo-head --out DIR writes it for other engines"
    folder = f"the folder specdec/demo_models/{embedded.removeprefix('demo-')}"
    return f"convert {folder} to GGUF" if llama else f"give {folder}"


@dataclass
class Exported:
    """A chain in an engine's options, by their names there; lost: what has no counterpart, and why."""

    options: Values = field(default_factory=dict)
    lost: list[dict[str, Any]] = field(default_factory=list)

    def lose(self, strategy: str | None, option: str | None, value: Any = None, why: str = UNKNOWN) -> None:
        self.lost.append({"strategy": strategy, "option": option, "value": value, "why": why})

    def lose_model(self, llama: bool, strategy: str | None, option: str, model: Any) -> None:
        if str(model) in EMBEDDED:
            self.lose(strategy, option, model, f"embedded in specdec: {_way_out(str(model), llama)}")
        elif llama and not str(model).endswith(".gguf"):
            self.lose(strategy, option, model, "llama.cpp reads GGUF files: convert it, and give the file")


def read_chain(run: RunConfig, settings: GenerationSettings) -> list[Strategy]:
    """Read the chain of a run. Raises SpecdecError for an unknown strategy or option, or a value out of range."""
    entries, default = run.strategies, run.strategies is None
    if entries is None:
        entries = ("prompt-lookup" if run.pair.draft is None else "draft-model",)
    chain = [_read(*parse_strategy(entry)) for entry in entries]
    for one in chain:
        if one.name == "draft-model":
            if run.pair.draft is None:
                raise SpecdecError("strategy 'draft-model' needs a draft model, and the pair has none: give --draft")
            loading = {k: v for k, v in vars(run.pair).items() if k.startswith("draft") and v is not None}
            one.values.update(loading)
            one.changed |= set(loading)
        if settings.draft_length is not None or default:
            one.automatic = settings.draft_length != "given"
    return sorted(chain, key=_place) if settings.order == "upstream" else chain


def _place(strategy: Strategy) -> int:
    return UPSTREAM_ORDER.index(strategy.name) if strategy.name in UPSTREAM_ORDER else len(UPSTREAM_ORDER)


def _read(name: str, options: Mapping[str, Any]) -> Strategy:
    known = parameters(find_strategy(name))
    defaults, automatic = {**known, **(DEFAULTS if name == "draft-model" else {})}, False
    if name in HEADS:
        values = {**defaults, **_checked(name, options, known)}
    else:
        unread = {k: v for k, v in options.items() if k in FILES and name == "ngram-cache"}
        drafter = make_drafters([{"name": name, **{k: v for k, v in options.items() if k not in unread}}], True)[0]
        values = {k: getattr(drafter, k) for k in known if hasattr(drafter, k)} | unread
        automatic = getattr(drafter, "automatic", False) is True
    named = set(DEFAULTS) | set(options) if "preset" in options else set(options)
    changed = {k for k, v in values.items() if k in named and v not in ({}, defaults[k])} - {"preset"}
    best = parse_opt(options.get("tree"))
    if best and name == "draft-model":  # as eagle3 has it
        values.update(nodes=best, top_k=min(best, 10), depth=min(values["n_max"], best) - 1)
    elif best:
        values["nodes"] = best
    elif name in SAMPLE and not values.get("nodes"):  # options of trees have no effect
        changed -= {"top_k", "depth"} | ({"p_split"} if values.get("branches") == 1 else set())
    return Strategy(name, values, changed, automatic)


def _checked(name: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the options of a strategy whose head is not read here."""
    for option, value in options.items():
        if option not in known:
            raise unknown_name(f"option of strategy {name!r}", option, known)
        if option in ("n_max", "nodes", "top_k", "depth") and (option, value) != ("nodes", "auto"):
            check_whole(f"{name}: {option}", value, 0 if option in ("nodes", "depth") else 1)
    if not isinstance(options.get("head"), str):
        raise SpecdecError(f"{name}: no head was given; pass head=FOLDER, or a hub id")
    if options.get("tree") is not None and not parse_opt(options["tree"]):
        parse_plan(options["tree"], name)
    return options


def translate(name: str, pair: PairConfig, chain: Sequence[Strategy], settings: GenerationSettings) -> Exported:
    """Write a chain in an engine's options, and list what is lost."""
    engine, made, used = ENGINES[name], Exported(), list[Strategy]()
    made.lose_model(name == "llama.cpp", None, "target", pair.target)
    if pair.kv_cache_dtype is not None:
        own = "-ctk and -ctv" if name == "llama.cpp" else "--kv-cache-dtype"
        made.lose(None, "kv_cache_dtype", pair.kv_cache_dtype, f"an option of the engine, not of its drafts: {own}")
    for one in chain:
        if one.name not in engine.ways:
            made.lose(one.name, None)
        elif used and name != "llama.cpp":
            made.lose(one.name, None, why=f"one strategy a server, and {used[0].name} comes first")
        elif one.model and made.options.get("-md", one.model) != one.model:
            made.lose(one.name, None, why="one draft a server, and an earlier strategy has another")
        else:
            used.append(one)
            _add(name, one, made)
    if used:
        made.options = {engine.method: ",".join(engine.ways[s.name][0] for s in used), **made.options}
    if used != sorted(used, key=_place):
        made.lose(None, "order", "given", "llama.cpp sorts its strategies, whatever order is given")
    _add_rule(engine, used, settings, made)
    for option in UNSERVED:
        if getattr(settings, option) not in (None, False, UNSET):
            made.lose(None, option, str(getattr(settings, option)))
    return made


def _add(engine: str, one: Strategy, made: Exported) -> None:
    """Add a strategy's options under the engine's names; those off their default that have none are lost."""
    names, values = ENGINES[engine].ways[one.name][1], dict(one.values)
    why = ADAPT[engine](one, values)
    for option, name in names.items():
        value = values.get(option)
        if value is not None and made.options.setdefault(name, value) != value:
            why[option] = f"{name} is {made.options[name]} for the whole chain"
    if one.automatic and one.values.get("n_max"):
        why["n_max"] = f"automatic lengths are fixed there: {one.values['n_max']} is written"
    for option in one.values:
        if option in why or (option in one.changed & set(values) - set(names)):
            made.lose(one.name, option, one.values[option], why.get(option, UNKNOWN))
    if one.model:
        made.lose_model(engine == "llama.cpp", one.name, "head" if one.values.get("head") else "draft", one.model)


def _vllm(one: Strategy, values: Values) -> dict[str, str]:
    """Turn a strategy's values into vLLM's; returns why options are lost."""
    why: dict[str, str] = {}
    if one.name == "draft-model" and values["translate"] == "intersection":
        values["intersection"] = values.pop("translate") == "intersection"
    elif one.name == "prompt-lookup" and values.pop("match") != "earliest":
        why["match"] = "vLLM takes the earliest occurrence"
    elif one.name == "dflash" and values["n_max"] is None:
        why["n_max"] = "vLLM may want a number: give n_max, at most the head's block less one"
    elif one.name == "suffix":
        if values["min_token_prob"] is None:
            why["min_token_prob"] = "votes are weighed here, and vLLM chooses as SuffixDecoding: give min_token_prob"
        if values["max_spec_factor"] is None:
            values["max_spec_factor"] = float(values["n_max"])  # no limit: n_max tokens after one that agrees
        values["depth"] += values["n_max"]  # vLLM's depth holds the draft as well
        values["cached"] = None if values.pop("remember") else 0  # None: as many as vLLM keeps by default
    return why


def _sglang(one: Strategy, values: Values) -> dict[str, str]:
    """Turn a strategy's values into SGLang's; returns why options are lost."""
    if values.get("nodes") == "auto":
        values["nodes"] = min(MOST, TreeSize(values["top_k"], values["depth"]).candidates)
        made = _sglang(one, values)
        return {**made, "nodes": f"trees are of one size there: {values['verified'] - 1} nodes, the most, are written"}
    if values.get("nodes"):
        values["verified"] = values.pop("nodes") + 1  # with the newest token, which SGLang counts
        values["n_max"] = values.pop("depth") + 1  # levels
        values.pop("tree", None)
    else:
        values["top_k"] = 1
        values["verified"] = None if values["n_max"] is None else values["n_max"] + 1
    if one.name in ("prompt-lookup", "dflash"):
        values.pop("n_max")
    own = "NGRAM looks into a trie, by rules of its own"
    return dict.fromkeys(("ngram_max", "ngram_min", "match"), own) if one.name == "prompt-lookup" else {}


def _llama(one: Strategy, values: Values) -> dict[str, str]:
    """Turn a strategy's values into llama.cpp's; returns why options are lost."""
    if one.name != "draft-model" or values.pop("top_n") == 10 or not values["p_min"]:
        return {}
    return {"top_n": "llama.cpp compares p_min over the 10 best tokens: give top_n=10"}


ADAPT: dict[str, Callable[[Strategy, Values], dict[str, str]]] = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama}


def _add_rule(engine: Engine, used: Sequence[Strategy], settings: GenerationSettings, made: Exported) -> None:
    """Add the acceptance rule where it matters: with drafts that have a q, and for rules that are lossy."""
    rule = find_rule(settings.acceptance)
    sampled = settings.temperature > 0 and any(s.name in SAMPLE and not s.values.get("nodes") for s in used)
    if not (sampled or (rule.lossy and used)):
        return
    options = engine.rules.get(rule.name, {})
    sampling = "--speculative-use-rejection-sampling" not in options or used[0].name in ("eagle3", "mtp")
    if not options or not sampling or made.options.get("use_heterogeneous_vocab"):
        made.lose(None, "acceptance", str(settings.acceptance))
    else:
        made.options.update(options)


def command(engine: Engine, target: Any, options: Mapping[str, Any]) -> list[str]:
    """The words that start the engine's server."""
    words = [*engine.command, str(target)]
    if not engine.method.startswith("--"):
        return [*words, *(["--speculative-config", json.dumps(options)] if options else [])]
    for name, value in options.items():
        words += [name] if value is True else [name, str(value)]
    return words


def document(name: str, target: Any, made: Exported) -> dict[str, Any]:
    """Plain data for JSON."""
    words = command(ENGINES[name], target, made.options)
    return {"names_from": ENGINES[name].version, "options": made.options, "command": words, "lost": made.lost}
