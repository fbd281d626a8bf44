"""One generation call: its rows, its chain and its engine, from checked options to the result."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec.config import UNSET, GenerationSettings, as_list, plain_ids
from specdec.decoding.acceptance import find_rule
from specdec.decoding.admission import NO_TEXT
from specdec.decoding.engine import Engine
from specdec.decoding.provenance import adapters, device_name, hash_ids, versions, weight_hash
from specdec.decoding.result import Generation, Round
from specdec.decoding.row import Row, StopRules
from specdec.decoding.shard import Shard
from specdec.decoding.validation import naming_processors
from specdec.decoding.verification import Verifier
from specdec.decoding.verify_pass import Wanted
from specdec.device.ambient import Steps
from specdec.device.memory import explaining, is_out_of_memory, size
from specdec.drafters.base import DraftContext
from specdec.drafters.chain import Chain, build_chain
from specdec.drafters.costs import as_costs, costs_for
from specdec.drafters.length import LengthController, automatic, unlimited
from specdec.drafters.policies import LengthPolicy, PolicyLengths, draft_length, find_policy
from specdec.errors import SpecdecError
from specdec.files.own_code import code_hashes
from specdec.models.adapters import Chosen, parse_choice
from specdec.models.kv_cache import KeptRows
from specdec.models.names import model_name
from specdec.models.runner import Shapes
from specdec.models.state import ModelState
from specdec.sampling.processor_check import check_processors, knows_its_row
from specdec.sampling.processors import AllRows
from specdec.sampling.sampling import build_sampling, row_key
from specdec.stats import DraftWarning, Stats, contributes_nothing

if TYPE_CHECKING:
    from specdec.decoder import SpeculativeDecoder

DEFAULT_BATCH = 8


class Call:
    """One generation call: its rows, and while it is entered, its engine."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        settings: GenerationSettings,
        drafters: Sequence[Any],
        prompts: Sequence[Sequence[int]],
        default_chain: bool,
        templates: Sequence[str | None],
    ):
        self.decoder, self.drafters, self.record, self.top = decoder, drafters, False, 0
        self.runners = decoder._runners()
        self.facts = {role: runner.facts for role, runner in self.runners.items()}
        self.is_open = False  # it has a cache, which it gives back once
        self.is_fresh = False  # it begins at once; a generator begins at its first step, when models may have changed
        self.states: dict[str, ModelState] = {}  # of the models when the call began, if anything is kept
        self.phase = "the beginning of the call"  # in which memory ran out
        self.changed: list[str] = []  # roles whose kept keys and values were dropped
        self.chosen = {role: self._parse_adapter(role, settings) for role in ("target", "draft")}
        self.rule = find_rule(settings.acceptance)
        self.exact = decoder.resolve_exact(settings.exact, drafters)
        self.settings = settings = replace(settings, seed=decoder.ranks.agreed(_fresh_seed(settings.seed)))
        self._choose_lengths(default_chain)
        stops, keys, n = self.stop_rules(settings), _row_keys(settings, len(prompts)), settings.num_return_sequences
        self.rows = [Row(i, list(prompts[i // n]), key, stops) for i, key in enumerate(keys)]
        settings.check_ids(decoder.target.vocab_size)
        self._make_sampling(stops)
        asked = [(row.prompt, row.key) for row in self.rows], settings.to_dict(), [d.name for d in drafters]
        decoder.ranks.check_same("prompts, seeds or options", asked)
        self.capacity = max((len(row.ids) - 1 for row in self.rows), default=1)
        whole, shard = len(self.rows), Shard.parse(settings.shard)
        self.rows = [row for row in self.rows if shard.has(row.index // n)]
        self.templates = [templates[row.index // n] for row in self.rows]
        # In exact mode a part has the passes that the whole would have.
        slots = whole if self.exact else len(self.rows)
        self.batch = min(settings.batch_size or DEFAULT_BATCH, max(1, slots))

    def _choose_lengths(self, default_chain: bool) -> None:
        """Settle which strategies' lengths are chosen, by what, and from which costs."""
        settings, decoder, drafters = self.settings, self.decoder, self.drafters
        self.policy = find_policy(settings.length_policy)
        self.automatic = automatic(drafters, draft_length(self.policy, settings.draft_length), default_chain)
        self.sets_lengths = any(self.automatic) and not isinstance(self.policy, LengthPolicy)
        self.costs = None
        if self.sets_lengths or any(d.sizes_trees for d in drafters):
            given = as_costs(settings.costs) or decoder.costs
            self.costs = costs_for(drafters, self.automatic, given, decoder.target, decoder.draft)

    def _make_sampling(self, stops: StopRules) -> None:
        """Make the processors, and try the user's out. Raises SpecdecError for those that cannot work."""
        settings, target, own = self.settings, self.decoder.target, as_list(self.settings.logits_processor)
        if own and self.rows:
            check_processors(own, self.rows[0].prompt, target.vocab_size, target.device)
            own = self._by_row(own)
        with naming_processors(settings):
            self.sampling = build_sampling(
                target.model,
                settings.fields,
                settings.temperature,
                sorted(t for t in stops.eos if 0 <= t < target.vocab_size),
                own,
                settings.prefix_allowed_tokens_fn,
                target.device,
                settings.num_return_sequences,
            )
            if self.sampling.row_processors is not None and self.rows:
                self.sampling.row_processors(0, self.rows[0].prompt, settings.max_new_tokens)  # bad values fail now

    def _parse_adapter(self, role: str, settings: GenerationSettings) -> Chosen:
        runner = self.runners.get(role)
        wanted = settings.adapter if role == "target" else settings.draft_adapter
        if runner is not None:
            return parse_choice(runner.model, wanted, role)
        if wanted is not UNSET:
            raise SpecdecError(f"draft_adapter={wanted!r} has no effect without a draft model")
        return None

    def _choose_adapters(self) -> None:
        """Choose the call's adapters: another call may have chosen others meanwhile."""
        for role, runner in self.runners.items():
            runner.choose_adapters(self.chosen[role])

    def _by_row(self, processors: Sequence[Any]) -> list[Any]:
        """Wrap a user's processors that treat rows differently in `AllRows`."""
        target, prompts = self.decoder.target, [row.prompt for row in self.rows]
        longest = self.settings.max_new_tokens
        return [
            AllRows(p, len(prompts)) if knows_its_row(p, prompts, longest, target.vocab_size, target.device) else p
            for p in processors
        ]

    def stop_rules(self, settings: GenerationSettings) -> StopRules:
        """When rows with these settings end. Raises SpecdecError for stop strings without a tokenizer."""
        decoder = self.decoder
        if settings.stops and decoder.tokenizer is None:
            raise SpecdecError("stop_strings needs a tokenizer: pass tokenizer=... when the decoder is built")
        eos = settings.eos_token_id
        if eos is UNSET:
            eos = getattr(decoder.target.model.generation_config, "eos_token_id", None)
        if settings.ignore_eos or eos is None:
            eos = []
        return StopRules(
            max_new_tokens=settings.max_new_tokens,
            context=decoder.target.context,
            eos=frozenset(int(t) for t in as_list(plain_ids(eos))),
            stop_strings=tuple(settings.stops),
            criteria=tuple(as_list(settings.stopping_criteria)),
            tokenizer=decoder.tokenizer,
        )

    def __enter__(self) -> Call:
        with self.decoder.working(), explaining(self.decoder.target.device, self._what_would_fit):
            self._begin()
        self.is_open = True
        return self

    def _drop(self) -> None:
        """Let go of everything that the call has allocated."""
        self.phase = self.engine.clock.entered
        self.engine.chain.close()
        for runner in self.runners.values():
            runner.pool.idle = None
        del self.engine

    def _what_would_fit(self, asked: int | None, free: int | None) -> str:
        """What takes the memory of a call, and what to do where it did not suffice. asked, free: bytes, if known."""
        rows, tokens, models = self.batch, self.capacity, self.decoder.report.models
        kept = sum(model.kv_bytes(rows, tokens) for model in models)
        needed = kept + (asked or 0)
        share = free / needed if free is not None and free < needed else 0.5  # else it is scattered
        ways = [f"batch_size={max(1, int(rows * share))}"] if rows > 1 else []
        if int(tokens * share) > 1:
            ways.append(f"{int(tokens * share)} tokens a row, prompt and max_new_tokens together")
        if any(runner.graphs is not None for runner in self.runners.values()):
            ways.append('compile="off"')
        ways.append("weights of fewer bits")
        weights = size(sum(model.weight_bytes for model in models))
        return (
            f"this was in {self.phase}; weights take {weights}, keys and values of {rows} rows of {tokens} tokens "
            f"{size(kept)}. What takes less: {', or '.join(ways)}"
        )

    def run(self) -> Iterator[list[Round]]:
        """Run `Engine.run` for callers that do other things between its steps."""
        return Steps(self._each_pass(), self.decoder._lock)

    def _each_pass(self) -> Iterator[list[Round]]:
        for found in self.engine.run():
            yield found
            self._check_models()
            self._choose_adapters()

    def _check_models(self) -> None:
        """Raise SpecdecError if a model has changed form since the call was made: its caches would not fit."""
        for role, runner in self.runners.items():
            if runner.facts != self.facts[role] or runner.measure() != self.facts[role]:
                raise SpecdecError(
                    f"the {role}'s device, dtype, vocabulary, context or number of layers has changed since this call "
                    "was made: make the call again"
                )

    def _what_is_kept(self) -> tuple[KeptRows | None, dict[str, Any]]:
        """Return what an earlier call kept, if the models are still those that made it: rows, and drafters by label."""
        decoder = self.decoder
        self.states = {role: ModelState(runner.view) for role, runner in self.runners.items()}
        if decoder._kept is None or decoder._kept_chain is None:
            return None, {}
        self.changed = [role for role, state in self.states.items() if decoder._kept_states.get(role) != state]
        drafters = decoder._kept_chain.by_label
        if "target" in self.changed:
            drafters = {label: d for label, d in drafters.items() if d.observed_layers is None}
        if "draft" in self.changed:
            drafters = {label: d for label, d in drafters.items() if not d.uses_draft_model}
        return None if "target" in self.changed else decoder._kept, drafters

    def _begin(self) -> None:
        decoder, target = self.decoder, self.decoder.target
        if not self.is_fresh:
            decoder.refresh()
        self._check_models()
        self._choose_adapters()
        kept, previous = self._what_is_kept() if self.settings.keep_state else (None, {})
        shapes = self._shapes()
        # A tree's nodes lie side by side in slots that a chain of the same depth would not need.
        spare = shapes.verify_width if any(d.makes_trees for d in self.drafters) else 0
        cache = target.lease(self.batch, self.capacity + spare)
        context = DraftContext(
            batch=self.batch,
            capacity=self.capacity,
            vocab_size=target.vocab_size,
            draft_runner=decoder.draft,
            tokenizer=decoder.tokenizer,
            draft_tokenizer=decoder.draft_tokenizer,
            reader=decoder.reader,
            previous=previous,
            nodes=shapes.verify_width - 1,
            separate=True,
            target=target,
            cache=cache,
            costs=self.costs,
            shapes=shapes,
            keeps_text=self.rule.keeps_text(self.sampling.greedy),
        )
        try:
            chain = self._chain(context, shapes)
        except BaseException:  # a strategy may refuse the target; what was recorded for the cache is not lost
            target.pool.give_back(cache)
            raise
        self.reads_before = decoder.reader.count
        self.recorded_before = {role: r.recorded for role, r in self.runners.items()}
        self.started = time.perf_counter()
        logprobs = self.settings.output_logprobs
        likely = 0 if isinstance(logprobs, bool) else logprobs
        verifier = Verifier(
            runner=target,
            cache=cache,
            shapes=shapes,
            rule=self.rule,
            sampling=self.sampling,
            batch=self.batch,
            vocab_size=target.vocab_size,
            reader=decoder.reader,
            wanted=Wanted(self.record, self.top, logprobs is not False, likely),
            observed=chain.observed_layers,
        )
        self.engine = Engine(verifier, chain, self.rows, kept)

    def _shapes(self) -> Shapes:
        """Choose the passes of the call."""
        target, trees = self.decoder.target, [d.tree_nodes + 1 for d in self.drafters if d.makes_trees]
        columns = max(self.settings.verify_width or 0, *trees, 0)
        shapes = Shapes.choose(target.device, self.exact, target.pool.room(self.capacity), columns)
        asked = self.decoder.exact if self.settings.exact is UNSET else self.settings.exact
        if self.exact and (asked != "auto" or self.settings.shard is not None):
            shapes = replace(shapes, together=0)  # no prompt's bits depend on which others the call or part begins with
        return shapes

    def _chain(self, context: DraftContext, shapes: Shapes) -> Chain:
        """Make the chain of the call, with what chooses its lengths."""
        longest = shapes.verify_width - 1
        drafters = [unlimited(d, longest) if a else d for d, a in zip(self.drafters, self.automatic, strict=True)]
        chain = build_chain(drafters, context)
        if isinstance(self.policy, LengthPolicy):
            chain.lengths = PolicyLengths(chain.drafters, self.policy, self.automatic, longest)
        if self.sets_lengths:
            assert self.costs is not None
            kind = LengthController if self.policy in (None, "fixed") else self.policy
            chain.lengths = kind(chain.drafters, self.automatic, self.costs, shapes, self.batch, context.keeps_text)
        return chain

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self.is_open:
            return
        self.is_open = False
        if is_out_of_memory(error):
            with explaining(self.decoder.target.device, self._what_would_fit):
                self._drop()
                raise error
        self.seconds = time.perf_counter() - self.started
        decoder, engine = self.decoder, self.engine
        keep = self.settings.keep_state and kind is None
        if not keep:
            engine.chain.close()
            decoder.target.pool.give_back(engine.cache)
            return
        if decoder._kept is not None and decoder._kept_chain is not None:
            decoder.target.pool.give_back(decoder._kept.cache)
            decoder._kept_chain.close()
        texts = [r.tokens.copy() if r is not None and r.error is None else NO_TEXT for r in engine.slots]
        decoder._kept, decoder._kept_chain = KeptRows(engine.cache, texts), engine.chain
        decoder._kept_states = self.states

    @property
    def done(self) -> float:
        """Share of the tokens that may still come at the beginning, from 0 to 1; a row that has ended counts whole."""
        most = self.settings.max_new_tokens
        whole = sum(most if row.finish_reason is not None else row.size - len(row.prompt) for row in self.rows)
        return whole / max(1, most * len(self.rows))

    def interrupt(self) -> None:
        """Mark every unfinished row."""
        self.engine.abandon()
        for row in self.rows:
            if row.finish_reason is None:
                row.fail("interrupted")

    def raise_if_failed(self) -> None:
        """Raise SpecdecError if every row has failed."""
        if self.rows and all(row.finish_reason == "error" for row in self.rows):
            raise SpecdecError(str(self.rows[0].error))

    def warn(self, stats: Stats) -> list[str]:
        """Name, in one warning, the strategies that contributed nothing; returns its sentences."""
        useless = stats.hardly_accepted().items()
        by_label = self.engine.chain.by_label
        found = [contributes_nothing(name, tally, by_label[name]) for name, tally in useless]
        if found:
            warnings.warn(" ".join(found), DraftWarning, stacklevel=4)
        return found

    def result(self) -> Generation:
        self.raise_if_failed()
        rows, stats = self.rows, self.engine.stats(self.seconds, self.reads_before)
        wanted = self.settings.output_logprobs
        return Generation(
            token_ids=[row.output for row in rows],
            texts=[row.text() for row in rows] if self.decoder.tokenizer is not None else None,
            finish_reasons=[str(row.finish_reason) for row in rows],
            stats=stats,
            provenance={**self._provenance(), "warnings": self.warn(stats)},
            errors=[row.error for row in rows],
            logprobs=[row.logprobs for row in rows] if wanted else None,
            top_logprobs=[row.top_logprobs for row in rows] if wanted and wanted is not True else None,
            origins=[row.origins for row in rows],
            lossy=self.rule.lossy,
            distances=[row.distances for row in rows] if self.rule.lossy else None,
            indices=[row.index for row in rows],
        )

    def _provenance(self) -> dict[str, Any]:
        return {
            "versions": versions(),
            "devices": {role: device_name(r.device) for role, r in self.runners.items()},
            "dtypes": {role: str(r.dtype) for role, r in self.runners.items()},
            "kv_cache_dtype": self.decoder.target.kv_cache_dtype,
            "models": {role: model_name(r.model) for role, r in self.runners.items()},
            "weights": {role: weight_hash(r.model) for role, r in self.runners.items()},
            "adapters": {role: adapters(r.view.model) for role, r in self.runners.items()},
            "dropped_state": self.changed,
            "prompts": [hash_ids(row.prompt) for row in self.rows],
            "chat_templates": self.templates,
            "seed": self.settings.seed,
            "settings": {**self.settings.to_dict(), "acceptance": self.rule.name},
            "strategies": [{"name": d.name, **d.parameters()} for d in self.drafters],
            "own_code": code_hashes([*self.drafters, self.rule.accepts]),
            "shared_state": [d.name for d in self.drafters if d.shares_state],
            "draft_length": ["auto" if a else "given" for a in self.automatic],
            "costs": None if self.costs is None else self.costs.to_dict(),
            "exact": self.exact,
            "fused": {role: len(r.fusion) for role, r in self.runners.items() if r.fusion is not None},
            "compile": {role: r.compile_report(self.recorded_before[role]) for role, r in self.runners.items()},
            "batch": self.batch,
            "overlap": {label: d.overlapped for label, d in self.engine.chain.by_label.items() if d.overlapped},
            "resumed": self.engine.verifier.resumed_report(),
            "lossy": self.rule.lossy,
        }


def _fresh_seed(seed: Any) -> Any:
    if isinstance(seed, (list, tuple)):
        return [_fresh_seed(s) for s in seed]
    return secrets.randbits(63) if seed is None else int(seed)


def _row_keys(settings: GenerationSettings, n_prompts: int) -> list[int]:
    """Make one key per row: int seed -> (seed, row); a list -> (seeds[prompt], index among its returned sequences)."""
    n = settings.num_return_sequences
    if not isinstance(settings.seed, list):
        return [row_key(settings.seed, i) for i in range(n_prompts * n)]
    if len(settings.seed) != n_prompts:
        raise SpecdecError(f"seed has {len(settings.seed)} entries for {n_prompts} prompts")
    return [row_key(seed, j) for seed in settings.seed for j in range(n)]
