"""`specdec bench --exactness`: whether speculative output equals plain output token for token, and what that costs.

Every group of runs decodes the same prompts plainly and with each chain, in one setting of dtype, batch size, exact
mode and sampling, and compares the rows. Rows that differ are explained by `why_not_equal`. The parts:

- `batch-1`: all prompts, greedy, exact, one slot: the draft model;
- `batch-8`: all prompts, greedy, eight slots that are refilled: every chain, with exact mode and without;
- `contrast`: a few prompts, greedy, one slot: the other chains with exact mode, the draft model without;
- `sampling`: a few prompts, sampled under `match` and `coupled`, exact, one slot and eight;
- `float16`: as `batch-8` with exact mode, in the other half precision (on a GPU).

The target can be inflated, so that real text is decoded at the cost of a large model; without a draft model of its own
the target, coarsened and not inflated, drafts. Passes run as `compile="auto"` has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.decoder import SpeculativeDecoder
from specdec.decoding.acceptance import RULES
from specdec.decoding.provenance import hash_ids, hash_template
from specdec.decoding.result import Generation
from specdec.errors import SpecdecError
from specdec.research.bench import origin
from specdec.research.exactness.equality import PassShape, content_dependence, float32_reference, why_not_equal
from specdec.research.models.choice import ModelChoice, facts
from specdec.research.prompts.datasets import encode_texts, load_prompts

PARTS = ("batch-1", "batch-8", "contrast", "sampling", "float16")
SAMPLED_RULES = tuple(name for name, rule in RULES.items() if getattr(rule, "same_text", False))
SLOTS = 8
WARM_UP_TOKENS = 8
LATE = "the time limit was reached"
Progress = Callable[[str], None]
Passed = Callable[[float], bool]  # whether a run of so many seconds would end too late


def _chains() -> dict[str, Sequence[Any]]:
    return {
        "draft-model": ("draft-model:n_max=3",),
        "prompt-lookup": ("prompt-lookup:n_max=12",),
        "chain": ("prompt-lookup:ngram_min=3:ngram_max=4:n_max=12", "draft-model:n_max=3"),
    }


@dataclass(frozen=True)
class ExactnessConfig(ModelChoice):
    """What is compared, with which models.

    prompts, few: number of prompts, and of those that the slow parts take.
    longest: tokens of a prompt's text; the rest is cut.
    temperature, seed: of the sampled runs.
    reports: differing rows of a run that are explained.
    chains: name -> strategies; the first is the only one where time is short.
    """

    dataset: str = "spec-bench"
    prompts: int = 100
    few: int = 20
    longest: int = 512
    max_new_tokens: int = 64
    temperature: float = 0.8
    seed: int = 0
    reports: int = 3
    chains: Mapping[str, Sequence[Any]] = field(default_factory=_chains)

    def to_dict(self) -> dict[str, Any]:
        """Plain data without this machine's paths."""
        return {**asdict(self), **self.names(), "chains": {k: [str(s) for s in v] for k, v in self.chains.items()}}

    def load_prompts(self) -> list[Any]:
        """The prompts, the few first, so that every part takes them from the front."""
        few, every = (load_prompts(self.dataset, limit=n, seed=self.seed) for n in (self.few, self.prompts))
        return [*few, *(p for p in every if p not in few)][: self.prompts]


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
    every, few, chains = config.prompts, min(config.few, config.prompts), tuple(config.chains)
    others = chains[1:] or chains  # the first chain is in batch-1
    settings = [(rule, batch) for rule in SAMPLED_RULES for batch in (1, SLOTS)]
    groups = [
        Group("batch-1", dtype, 1, every, True, chains[:1]),
        *(Group("batch-8", dtype, SLOTS, every, exact, chains) for exact in (True, False)),
        Group("contrast", dtype, 1, few, True, others),
        Group("contrast", dtype, 1, few, False, chains[:1]),
        *(Group("sampling", dtype, batch, few, True, chains[:1], rule) for rule, batch in settings),
        Group("float16", "float16", SLOTS, every, True, chains),
    ]
    return [group for group in groups if group.part in chosen]


def run_exactness(
    config: ExactnessConfig,
    parts: Iterable[str] = PARTS,
    time_limit: float | None = None,
    progress: Progress = lambda what: None,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run the parts. Raises SpecdecError for bad input.

    time_limit: seconds after which no run starts; what it keeps from running is listed as skipped.
    save: gets the result so far after every group.
    """
    if not config.chains:
        raise SpecdecError("exactness: chains is empty: name at least one")
    started = time.perf_counter()

    def passed(needed: float = 0.0) -> bool:
        return time_limit is not None and time.perf_counter() + needed > started + time_limit

    device, dtype = config.place()
    groups = plan(config, parts, dtype)
    progress("loading the models")
    models = config.load()
    prompts = encode_texts(config.load_prompts(), models.tokenizer, models.target, config.longest)
    result = {"benchmark": "exactness", "config": config.to_dict(), **origin(), "models": {}, "content": {}}
    result |= {"groups": [], "prompt_hashes": [hash_ids(ids) for ids in prompts]}
    result["chat_template"] = hash_template(models.tokenizer)
    decoder: SpeculativeDecoder | None = None
    for group in groups:
        reason = _reason_to_skip(group, device.type, passed())
        if reason is not None:
            result["groups"].append({**asdict(group), "skipped": reason})
            continue
        if group.dtype not in result["content"]:
            decoder = None  # the old target goes before the new one comes
            progress(f"building the target in {group.dtype}")
            target, draft = models.built(group.dtype, keep=True)
            decoder = SpeculativeDecoder(target, draft, models.tokenizer, kv_cache_dtype=config.kv_cache_dtype)
            result["models"] = {"target": facts(target), "draft": facts(draft)}
            result["content"][group.dtype] = _content(decoder)
        assert decoder is not None
        comparison = Comparison(config, group, decoder, prompts[: group.prompts])
        result["groups"].append(comparison.run(passed, progress))
        result["seconds"] = time.perf_counter() - started
        save(result)
    return result


def _content(decoder: SpeculativeDecoder) -> dict[str, Any]:
    """`content_dependence` at the batch sizes of the benchmark, together."""
    found = [content_dependence(decoder.target, batch=batch) for batch in (1, SLOTS)]
    largest = max(f["largest"] for f in found)
    return {**{k: sum(f[k] for f in found) for k in ("compared", "differing")}, "largest": largest}


def _reason_to_skip(group: Group, device: str, late: bool) -> str | None:
    if group.rule is not None and group.rule not in RULES:
        return f"the acceptance rule {group.rule!r} is not registered"
    if group.part == "float16" and device == "cpu":
        return "float16 is compared on a GPU"
    return LATE if late else None


@dataclass
class Comparison:
    """One group: plain decoding once, then every chain, compared row by row.

    reference: a float32 copy of the target, made when the first row differs.
    """

    config: ExactnessConfig
    group: Group
    decoder: SpeculativeDecoder
    prompts: list[list[int]]
    reference: Any = None

    def run(self, passed: Passed, progress: Progress) -> dict[str, Any]:
        """The group's entry in the result."""
        g = self.group
        kind = f"{g.rule} at T = {self.config.temperature}" if g.rule else "greedy"
        title = f"{g.part}: {g.dtype}, batch {g.batch}, {'exact' if g.exact else 'not exact'}, {kind}"
        chains = {name: list(self.config.chains[name]) for name in g.chains}
        self.decoder.generate(self.prompts[:1], WARM_UP_TOKENS, next(iter(chains.values())), **self._options())
        progress(f"{title}: plain")
        plain, figures = self._timed([])
        runs: dict[str, Any] = {}
        for name, strategies in chains.items():
            if passed(figures["seconds"]):
                runs[name] = {"skipped": LATE}
                continue
            progress(f"{title}: {name}")
            out, its_figures = self._timed(strategies)
            runs[name] = {**its_figures, **self._compare(plain.token_ids, out)}
        return {**asdict(g), "plain": figures, "runs": runs}

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
        stats, total = out.stats, out.stats.total
        warnings = out.provenance["warnings"]
        return out, {
            **({"warnings": warnings} if warnings else {}),
            "seconds": seconds,
            "tokens": stats.emitted_tokens,
            "tokens_per_second": stats.emitted_tokens / seconds,
            "verify_passes": stats.verify_passes,
            "ms_per_pass": 1e3 * stats.times.verify / max(1, stats.verify_passes),
            "tokens_per_round": total.tokens_per_round,
            "acceptance": total.conditional_acceptance_rate,
            "failed_rows": out.finish_reasons.count("error"),
        }

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
        a, b = (PassShape(n, slots, group.exact, fixed) for n in (1, width))
        options = {k: v for k, v in self._options().items() if k in ("temperature", "acceptance", "seed")}
        options |= {"names": ("plain", "speculative"), "shape_a": a, "shape_b": b, "reference": self.reference}
        return why_not_equal(self.decoder, self.prompts[row], plain, drafted, row=row, **options).to_dict()
