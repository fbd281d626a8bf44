"""`specdec bench --exactness`: whether speculative output equals plain output token for token, and what that costs.

Every group of runs decodes the same prompts plainly and with each chain, in one setting of dtype, batch size, exact
mode and sampling, and compares the rows. Rows that differ are explained by `why_not_equal`. The parts:

- `batch-1`: all prompts, greedy, exact, one slot: the draft model;
- `batch-8`: all prompts, greedy, eight slots that are refilled: every chain, with exact mode and without;
- `contrast`: a few prompts, greedy, one slot: the other chains with exact mode, the draft model without;
- `sampling`: a few prompts, sampled under `match` and `coupled`, exact, one slot and eight;
- `float16`: as `batch-8` with exact mode, in the other half precision (on a GPU).

The target can be inflated (research/models/inflate.py), so that real text is decoded at the cost of a large model;
without a draft model of its own the target, coarsened and not inflated, drafts. Passes run as `compile="auto"` has
them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec.decoder import SpeculativeDecoder
from specdec.decoding.acceptance import RULES
from specdec.decoding.provenance import hash_ids, hash_template
from specdec.decoding.result import Generation
from specdec.errors import SpecdecError
from specdec.models.loading import LoadedPair, pick_device
from specdec.research.bench import origin
from specdec.research.exactness.equality import PassShape, content_dependence, float32_reference, why_not_equal
from specdec.research.models.inflate import Inflation, check_coarsening, coarsen, inflate
from specdec.research.prompts.datasets import encode_texts, load_prompts

PARTS = ("batch-1", "batch-8", "contrast", "sampling", "float16")
SAMPLED_RULES = ("match", "coupled")
SLOTS = 8
WARM_UP_TOKENS = 8
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ExactnessConfig:
    """What is compared.

    target, draft: as `SpeculativeDecoder.from_pretrained` takes them; draft None = the target, coarsened. inflate: a
    preset or sizes of `Inflation.parse`, None = the target as it is. coarsen: strength of the draft's rounding, None =
    0.2. dtype: None = bfloat16 on a GPU, float32 on a CPU. prompts: number of prompts, few: of those that the slow
    parts take; longest: tokens of a prompt's text, the rest is cut. chains: name -> strategies; the first is the only
    one where time is short. reports: differing rows of a run that are explained.
    """

    target: str = "demo-target"
    draft: str | None = "demo-draft"
    inflate: str | None = None
    coarsen: float | None = None
    device: str | None = None
    dtype: str | None = None
    dataset: str = "spec-bench"
    prompts: int = 100
    few: int = 20
    longest: int = 512
    max_new_tokens: int = 64
    temperature: float = 0.8
    seed: int = 0
    reports: int = 3
    shared_device: bool = False
    chains: Mapping[str, Sequence[Any]] = field(
        default_factory=lambda: {
            "draft-model": ("draft-model:n_max=3",),
            "prompt-lookup": ("prompt-lookup:n_max=12",),
            "chain": ("prompt-lookup:ngram_min=3:ngram_max=4:n_max=12", "draft-model:n_max=3"),
        }
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "coarsen", check_coarsening(self.draft, self.coarsen))

    def to_dict(self) -> dict[str, Any]:
        """Plain data without this machine's paths."""
        names = {
            k: Path(v).name if v is not None else None for k, v in (("target", self.target), ("draft", self.draft))
        }
        return {**asdict(self), **names, "chains": {k: [str(s) for s in v] for k, v in self.chains.items()}}


@dataclass(frozen=True)
class Group:
    """One setting: plain decoding and `chains` on the first `prompts` prompts. rule: None = greedy."""

    part: str
    dtype: str
    batch: int
    prompts: int
    exact: bool
    chains: tuple[str, ...]
    rule: str | None = None


def plan(config: ExactnessConfig, parts: Iterable[str], dtype: str) -> list[Group]:
    """The groups of the parts, in their order. Raises SpecdecError for an unknown part."""
    chosen = list(parts)
    for part in chosen:
        if part not in PARTS:
            raise SpecdecError(f"unknown part {part!r}; known: {', '.join(PARTS)}")
    every, few = config.prompts, min(config.few, config.prompts)
    chains = tuple(config.chains)
    groups = {
        "batch-1": [Group("batch-1", dtype, 1, every, True, chains[:1])],
        "batch-8": [Group("batch-8", dtype, SLOTS, every, exact, chains) for exact in (True, False)],
        "contrast": [
            Group("contrast", dtype, 1, few, True, chains[1:] or chains),  # the first chain is in batch-1
            Group("contrast", dtype, 1, few, False, chains[:1]),
        ],
        "sampling": [
            Group("sampling", dtype, batch, few, True, chains[:1], rule)
            for rule in SAMPLED_RULES
            for batch in (1, SLOTS)
        ],
        "float16": [Group("float16", "float16", SLOTS, every, True, chains)],
    }
    return [group for part in PARTS if part in chosen for group in groups[part]]


def run_exactness(
    config: ExactnessConfig,
    parts: Iterable[str] = PARTS,
    time_limit: float | None = None,
    progress: Progress = lambda what: None,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run the parts. time_limit: seconds after which no run starts; what it keeps from running is listed as skipped.
    `save` gets the result so far after every group. Raises
    SpecdecError for bad input."""
    if not config.chains:
        raise SpecdecError("exactness: chains is empty: name at least one")
    started = time.perf_counter()
    device = pick_device(config.device)
    dtype = config.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    groups = plan(config, parts, dtype)
    deadline = Deadline(started, time_limit)
    result: dict[str, Any] = {
        "benchmark": "exactness", "config": config.to_dict(), **origin(), "models": {}, "content": {}, "groups": [],
    }  # fmt: skip
    progress("loading the models")
    models = Models.load(config, device)
    result["prompt_hashes"] = [hash_ids(ids) for ids in models.prompts]
    result["chat_template"] = hash_template(models.tokenizer)
    decoder: SpeculativeDecoder | None = None
    for group in groups:
        reason = _reason_to_skip(group, device, deadline)
        if reason is not None:
            result["groups"].append({**asdict(group), "skipped": reason})
            continue
        if group.dtype not in result["content"]:
            decoder = None  # the old target goes before the new one comes
            progress(f"building the target in {group.dtype}")
            decoder = models.decoder(group.dtype)
            result["models"] = models.facts(decoder)
            result["content"][group.dtype] = _content(decoder)
        assert decoder is not None
        result["groups"].append(
            Comparison(config, group, decoder, models.prompts[: group.prompts]).run(deadline, progress)
        )
        result["seconds"] = time.perf_counter() - started
        save(result)
    return result


def _content(decoder: SpeculativeDecoder) -> dict[str, Any]:
    """`content_dependence` at the batch sizes of the benchmark, together."""
    found = [content_dependence(decoder.target, batch=batch) for batch in (1, SLOTS)]
    largest = max(f["largest"] for f in found)
    return {**{k: sum(f[k] for f in found) for k in ("compared", "differing")}, "largest": largest}


@dataclass(frozen=True)
class Deadline:
    """When to stop starting runs; seconds None = never."""

    started: float
    seconds: float | None

    def passed(self, needed: float = 0.0) -> bool:
        """Whether a run of `needed` seconds would end too late."""
        return self.seconds is not None and time.perf_counter() + needed > self.started + self.seconds


def _reason_to_skip(group: Group, device: torch.device, deadline: Deadline) -> str | None:
    if group.rule is not None and group.rule not in RULES:
        return f"the acceptance rule {group.rule!r} is not registered"
    if group.dtype == "float16" and device.type == "cpu" and group.part == "float16":
        return "float16 is compared on a GPU"
    return "the time limit was reached" if deadline.passed() else None


@dataclass
class Models:
    """The small models in float32 as loaded, and the prompts' ids."""

    config: ExactnessConfig
    device: torch.device
    target: Any
    draft: Any
    tokenizer: Any
    prompts: list[list[int]]

    @staticmethod
    def load(config: ExactnessConfig, device: torch.device) -> Models:
        """Raises SpecdecError for what cannot be loaded."""
        grown = Inflation.parse(config.inflate) if config.inflate is not None else None
        # The few come first, so that every part takes the prompts from the front.
        few, every = (load_prompts(config.dataset, limit=n, seed=config.seed) for n in (config.few, config.prompts))
        chosen = [*few, *(p for p in every if p not in few)][: config.prompts]
        # An inflated target is built on the device from a small one in host memory.
        home = torch.device("cpu") if grown is not None else device
        pair = LoadedPair.load(config.target, config.draft, device=home, dtype="float32", draft_dtype="float32")
        draft = pair.draft if config.coarsen is None else coarsen(pair.target, config.coarsen)
        ids = encode_texts(chosen, pair.tokenizer, pair.target, config.longest)
        return Models(config, device, pair.target, draft, pair.tokenizer, ids)

    def decoder(self, dtype: str) -> SpeculativeDecoder:
        """The pair in `dtype` on the device."""
        kind = getattr(torch, dtype)
        if self.config.inflate is None:
            target = copy.deepcopy(self.target).to(self.device, kind)
        else:
            target = inflate(
                self.target, **asdict(Inflation.parse(self.config.inflate)), dtype=kind, device=self.device
            )
        return SpeculativeDecoder(target, copy.deepcopy(self.draft).to(self.device, kind), self.tokenizer)

    def facts(self, decoder: SpeculativeDecoder) -> dict[str, Any]:
        """Shapes of both models."""
        names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        made = {}
        for role, runner in decoder._runners().items():
            size = sum(p.numel() for p in runner.model.parameters())
            made[role] = {"parameters": size, **{n: getattr(runner.config, n) for n in names}}
        return made


@dataclass
class Comparison:
    """One group: plain decoding once, then every chain, compared row by row."""

    config: ExactnessConfig
    group: Group
    decoder: SpeculativeDecoder
    prompts: list[list[int]]
    reference: Any = None  # a float32 copy of the target, made when the first row differs

    def run(self, deadline: Deadline, progress: Progress) -> dict[str, Any]:
        """The group's entry in the result."""
        self.decoder.generate(self.prompts[:1], WARM_UP_TOKENS, strategies=self._chain(0), **self._options())
        progress(f"{self._title()}: plain")
        plain, figures = self._timed([])
        runs: dict[str, Any] = {}
        for i, name in enumerate(self.group.chains):
            if deadline.passed(figures["seconds"]):
                runs[name] = {"skipped": "the time limit was reached"}
                continue
            progress(f"{self._title()}: {name}")
            out, its_figures = self._timed(self._chain(i))
            runs[name] = {**its_figures, **self._compare(plain.token_ids, out)}
        return {**asdict(self.group), "plain": figures, "runs": runs}

    def _title(self) -> str:
        g = self.group
        kind = f"{g.rule} at T = {self.config.temperature}" if g.rule else "greedy"
        return f"{g.part}: {g.dtype}, batch {g.batch}, {'exact' if g.exact else 'not exact'}, {kind}"

    def _chain(self, index: int) -> list[Any]:
        return list(self.config.chains[self.group.chains[index]])

    def _options(self) -> dict[str, Any]:
        sampled = {"temperature": self.config.temperature, "acceptance": self.group.rule} if self.group.rule else {}
        return {"batch_size": self.group.batch, "exact": self.group.exact, "seed": self.config.seed, **sampled}

    def _timed(self, strategies: list[Any]) -> tuple[Generation, dict[str, Any]]:
        """A run and its figures. Seconds are wall-clock time around the whole call."""
        started = time.perf_counter()
        out = self.decoder.generate(self.prompts, self.config.max_new_tokens, strategies=strategies, **self._options())
        seconds = time.perf_counter() - started
        if "interrupted" in out.finish_reasons:
            raise KeyboardInterrupt
        assert out.provenance["exact"] == self.group.exact
        stats = out.stats
        return out, {
            "seconds": seconds, "tokens": stats.emitted_tokens, "tokens_per_second": stats.emitted_tokens / seconds,
            "verify_passes": stats.verify_passes, "ms_per_pass": 1e3 * stats.times.verify / max(1, stats.verify_passes),
            "tokens_per_round": stats.tokens_per_round, "acceptance": _tested(stats),
            "failed_rows": out.finish_reasons.count("error"),
        }  # fmt: skip

    def _compare(self, plain: Sequence[list[int]], out: Generation) -> dict[str, Any]:
        """Which rows differ, and why the first of them do."""
        differing = [i for i, (a, b) in enumerate(zip(plain, out.token_ids, strict=True)) if a != b]
        explained = differing[: self.config.reports]
        if explained and self.reference is None:
            # Where there is no room for a copy, every report says so.
            self.reference = float32_reference(self.decoder.target)[0] or "auto"
        # The widest pass that the row can have seen, as drafts go.
        widths = [1 + max((r.drafted for r in records), default=0) for records in out.stats.rows]
        reports = [{"row": i, **self._explain(i, plain[i], out.token_ids[i], widths[i])} for i in explained]
        return {"identical": len(plain) - len(differing), "differing": differing, "reports": reports}

    def _explain(self, row: int, plain: list[int], drafted: list[int], width: int) -> dict[str, Any]:
        group = self.group
        capacity = max(len(p) for p in self.prompts) + self.config.max_new_tokens - 1  # the call's
        slots, fixed = min(group.batch, len(self.prompts)), capacity if group.exact else None
        shapes = [PassShape(n, slots, group.exact, fixed) for n in (1, width)]
        options = {k: v for k, v in self._options().items() if k in ("temperature", "acceptance", "seed")}
        return why_not_equal(
            self.decoder, self.prompts[row], plain, drafted, names=("plain", "speculative"), shape_a=shapes[0],
            shape_b=shapes[1], reference=self.reference, row=row, **options,
        ).to_dict()  # fmt: skip


def _tested(stats: Any) -> float | None:
    """Share of the tested drafts that stood."""
    records = [r for row in stats.rows for r in row]
    tested = sum(min(r.accepted + 1, r.drafted) for r in records)
    return sum(r.accepted for r in records) / tested if tested else None
