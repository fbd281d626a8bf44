"""`SpeculativeDecoder`: what users hold. Checks a call, builds its rows, chain and engine, and returns its result."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specdec.acceptance import find_rule
from specdec.config import UNSET, GenerationSettings, as_list, check_exact
from specdec.contract import check_processors
from specdec.costs import as_costs, costs_for
from specdec.drafters import make_drafters
from specdec.drafters.base import DraftContext
from specdec.drafters.chain import Chain, build_chain, upstream_order
from specdec.drafters.length import LengthController, automatic, unlimited
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.graphs import check_compile
from specdec.kv_cache import KeptRows
from specdec.loading import LoadedPair, check_is_model, check_model_kind, check_modules, self_test
from specdec.prompts import TextStream, encode_prompts
from specdec.provenance import WeightHash, device_name, hash_ids, versions
from specdec.result import Generation, Round
from specdec.rows import Row, StopRules
from specdec.runner import HostReader, Runner, Shapes
from specdec.sampling import build_sampling, row_key

DEFAULT_BATCH = 8


class SpeculativeDecoder:
    """A target model, perhaps a draft model, and a chain of strategies.

    target_model, draft_model: transformers causal language models, left as they are; tokenizer: for text prompts and
    texts; draft_tokenizer: the draft's, None = the same; strategies: names or configured drafters in priority order,
    None = `draft-model` with a draft and `prompt-lookup` without, [] = plain decoding; attn_implementation: None =
    specdec's own, or "sdpa" / "eager"; exact: True, False or "auto" (docs/exactness.md); compile: "off", "graph",
    "inductor", "max", or "auto" = "graph" on a GPU (docs/speed.md); costs: a `specdec.CostTable` or its file, for
    automatic draft length, None = nominal (docs/automatic_length.md).

    Raises SpecdecError for a pair that cannot work and for a model whose ragged pass is not its plain pass.
    """

    def __init__(
        self,
        target_model: Any,
        draft_model: Any = None,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        strategies: Any = None,
        *,
        attn_implementation: str | None = None,
        exact: Any = "auto",
        compile: str = "off",
        check: bool = True,
        costs: Any = None,
    ):
        check_exact(exact)
        check_compile(compile)
        self.costs = as_costs(costs)
        self.default_chain = strategies is None
        self.strategies = make_drafters(strategies, draft_model is not None)
        for model, role in ((target_model, "target"), (draft_model, "draft")):
            if model is not None or role == "target":
                check_is_model(model, role)
                check_model_kind(model.config, role)
        translate = any(getattr(d, "translate", False) for d in self.strategies)
        self.report = check_modules(target_model, draft_model, tokenizer, draft_tokenizer, translate)
        self.target = Runner(target_model, attn_implementation, compile)
        self.draft = Runner(draft_model, attn_implementation, compile) if draft_model is not None else None
        self.tokenizer, self.draft_tokenizer = tokenizer, draft_tokenizer or tokenizer
        self.exact = exact
        self.reader = HostReader()
        self._hashes = {role: WeightHash(r.model) for role, r in self._runners().items()}
        self._kept: KeptRows | None = None
        self._kept_chain: Chain | None = None
        if check:
            for role, runner in self._runners().items():
                self_test(runner, role)

    @classmethod
    def from_pretrained(
        cls, target: str | Path, draft: str | Path | None = None, strategies: Any = None, **options: Any
    ) -> SpeculativeDecoder:
        """Load a pair by hub id, folder or GGUF file; options are those of `specdec.load_pair` and of this class."""
        own = {name: options.pop(name) for name in ("exact", "compile", "check", "costs") if name in options}
        check_exact(own.get("exact", "auto"))
        check_compile(own.get("compile", "off"))
        drafters = make_drafters(strategies, draft is not None)
        check_draft(drafters, draft)
        translate = any(getattr(d, "translate", False) for d in drafters)
        pair = LoadedPair.load(target, draft, translate=translate, **options)
        attention = options.get("attn_implementation")
        decoder = cls(
            pair.target, pair.draft, pair.tokenizer, pair.draft_tokenizer, strategies,
            attn_implementation=attention, **own,
        )  # fmt: skip
        decoder.report = pair.report
        return decoder

    def _runners(self) -> dict[str, Runner]:
        return {role: r for role, r in (("target", self.target), ("draft", self.draft)) if r is not None}

    @property
    def host_reads(self) -> int:
        """Transfers from the device since this decoder was built."""
        return self.reader.count

    # -- public calls --------------------------------------------------------------------------------------------

    def generate(self, prompts: Any, max_new_tokens: int = 128, strategies: Any = UNSET, **options: Any) -> Generation:
        """Generate for one prompt or many. Options: `specdec.GenerationSettings`, field by field, and every processor
        field of transformers' GenerationConfig by its own name.

        A KeyboardInterrupt ends the call early: finished tokens are returned, unfinished rows with reason
        `interrupted`. Raises SpecdecError for bad input before any work, and if every row fails.
        """
        call = self._call(prompts, strategies, max_new_tokens=max_new_tokens, **options)
        with call:
            try:
                for _ in call.engine.run():
                    pass
            except KeyboardInterrupt:
                call.interrupt()
        return call.result()

    def stream(self, prompt: Any, max_new_tokens: int = 128, strategies: Any = UNSET, **options: Any) -> Iterator[str]:
        """The text of one prompt, piece by piece; joined pieces equal `generate(...).texts[0]`."""
        if self.tokenizer is None:
            raise SpecdecError("stream needs a tokenizer: pass tokenizer=... when the decoder is built")
        call = self._single(prompt, "stream", strategies, max_new_tokens=max_new_tokens, **options)
        return self._pieces(call)

    def rounds(
        self, prompt: Any, max_new_tokens: int = 128, strategies: Any = UNSET, **options: Any
    ) -> Iterator[Round]:
        """One prompt, one `Round` at a time, with p and q at the drafted tokens."""
        call = self._single(prompt, "rounds", strategies, max_new_tokens=max_new_tokens, **options)
        call.record = True
        return self._each_round(call)

    def _pieces(self, call: Call) -> Iterator[str]:
        row = call.rows[0]
        text = TextStream(row.stops.stop_strings)
        with call:
            for _ in call.engine.run():
                piece = text.piece(row.text()) if row.finish_reason is None else ""
                if piece:
                    yield piece
        call.raise_if_failed()
        rest = text.rest(row.text())
        if rest:
            yield rest

    def _each_round(self, call: Call) -> Iterator[Round]:
        with call:
            for rounds in call.engine.run():
                yield from rounds

    # -- building a call -----------------------------------------------------------------------------------------

    def _single(self, prompt: Any, verb: str, strategies: Any, **options: Any) -> Call:
        call = self._call(prompt, strategies, **options)
        if len(call.rows) != 1:
            raise SpecdecError(f"{verb} takes one prompt, got {len(call.rows)} rows")
        return call

    def _call(self, prompts: Any, strategies: Any, **options: Any) -> Call:
        settings = GenerationSettings.parse(options)
        drafters = self.strategies if strategies is UNSET else make_drafters(strategies, self.draft is not None)
        check_draft(drafters, self.draft)
        if settings.order == "upstream":
            drafters = upstream_order(drafters)
        encoded = encode_prompts(prompts, self.tokenizer, self.target.vocab_size, self.target.context)
        default = self.default_chain if strategies is UNSET else strategies is None
        return Call(self, settings, drafters, encoded, default)

    def resolve_exact(self, choice: Any, drafters: Sequence[Any] = ()) -> bool:
        """Whether a call runs with fixed shapes; `auto` = dense half-precision models on a GPU, and chains only."""
        choice = self.exact if choice is UNSET else choice
        config = self.target.config
        experts = any(getattr(config, n, None) for n in ("num_experts", "num_local_experts", "n_routed_experts"))
        # Experts that are one batched product a token see no other tokens; all other implementations group tokens.
        grouped = experts and getattr(config, "_experts_implementation", None) != "batched_mm"
        trees = tree_makers(drafters)
        quantised = getattr(self.target.model.config, "quantization_config", None) is not None
        if choice == "auto":
            half = self.target.dtype in (torch.bfloat16, torch.float16)
            return self.target.device.type == "cuda" and half and not experts and not quantised and not trees
        if choice and trees:
            raise SpecdecError(
                f"exact=True does not cover trees, which strategy {trees[0]!r} can make: an ancestor in another slot "
                "changes the order of summation"
            )
        if choice and quantised:
            raise SpecdecError("exact=True does not cover quantised models: their kernels have not been measured")
        if choice and grouped:
            raise SpecdecError(
                "exact=True does not cover mixture-of-experts models that group tokens by expert: their passes depend "
                'on what else is in them; model.set_experts_implementation("batched_mm") makes them independent'
            )
        return bool(choice)


def tree_makers(drafters: Sequence[Any]) -> list[str]:
    """Names of the strategies whose drafts can be trees."""
    return [d.name for d in drafters if getattr(d, "makes_trees", False)]


def check_draft(drafters: Sequence[Any], draft: Any) -> None:
    """Raise SpecdecError for a chain that needs a draft model where there is none."""
    if draft is None and any(d.name == "draft-model" for d in drafters):
        raise SpecdecError("strategy 'draft-model' needs a draft model: pass draft=... when the decoder is built")


class Call:
    """One generation call: its rows, and while it is entered, its engine."""

    def __init__(
        self, decoder: SpeculativeDecoder, settings: GenerationSettings, drafters: Sequence[Any],
        prompts: Sequence[Sequence[int]], default_chain: bool = False,
    ):  # fmt: skip
        self.decoder, self.drafters, self.record, self.top = decoder, drafters, False, 0
        self.rule = find_rule(settings.acceptance)
        self.exact = decoder.resolve_exact(settings.exact, drafters)
        self.settings = settings = replace(settings, seed=_fresh_seed(settings.seed))
        self.automatic = automatic(drafters, settings.draft_length, default_chain)
        self.costs = None
        if any(self.automatic):
            given = as_costs(settings.costs) or decoder.costs
            self.costs = costs_for(drafters, self.automatic, given, decoder.target, decoder.draft)
        stops = self._stop_rules()
        keys = _row_keys(settings, len(prompts))
        n = settings.num_return_sequences
        self.rows = [Row(i, list(prompts[i // n]), key, stops) for i, key in enumerate(keys)]
        settings.check_ids(decoder.target.vocab_size)
        own = as_list(settings.logits_processor)
        if own and self.rows:
            check_processors(own, self.rows[0].prompt, decoder.target.vocab_size, decoder.target.device)
        try:
            self.sampling = build_sampling(
                decoder.target.model, settings.fields, settings.temperature,
                sorted(t for t in stops.eos if 0 <= t < decoder.target.vocab_size),
                own, settings.prefix_allowed_tokens_fn, decoder.target.device, settings.num_return_sequences,
            )  # fmt: skip
            if self.sampling.row_processors is not None and self.rows:
                self.sampling.row_processors(0, self.rows[0].prompt, settings.max_new_tokens)  # bad values fail now
        except SpecdecError:
            raise
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            names = ", ".join(settings.processors) or "the sampling options"
            raise SpecdecError(f"transformers refuses {names}: {error}") from error
        self.batch = min(settings.batch_size or DEFAULT_BATCH, max(1, len(self.rows)))
        self.capacity = max((len(row.ids) - 1 for row in self.rows), default=1)

    def _stop_rules(self) -> StopRules:
        decoder, settings = self.decoder, self.settings
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
            eos=frozenset(int(t) for t in as_list(eos)),
            stop_strings=tuple(settings.stops),
            criteria=tuple(as_list(settings.stopping_criteria)),
            tokenizer=decoder.tokenizer,
        )

    def __enter__(self) -> Call:
        decoder, target = self.decoder, self.decoder.target
        keep = self.settings.keep_state
        previous = decoder._kept_chain if keep else None
        shapes = Shapes.choose(target.device, self.exact, target.pool.room(self.capacity))
        context = DraftContext(
            self.batch, self.capacity, target.vocab_size, decoder.draft, decoder.tokenizer, decoder.draft_tokenizer,
            decoder.reader, dict(zip(previous.labels, previous.drafters, strict=True)) if previous else {},
            shapes.verify_width - 1,
        )  # fmt: skip
        longest = shapes.verify_width - 1
        drafters = [unlimited(d, longest) if a else d for d, a in zip(self.drafters, self.automatic, strict=True)]
        chain = build_chain(drafters, context)
        if self.costs is not None:
            free = self.sampling.greedy or self.rule.proposal != "sample"  # the text does not depend on drafts
            chain.lengths = LengthController(chain.drafters, self.automatic, self.costs, shapes, self.batch, free)
        # A tree's nodes lie side by side in slots that a chain of the same depth would not need.
        spare = shapes.verify_width if tree_makers(self.drafters) else 0
        self.reads_before = decoder.reader.count
        self.recorded_before = {role: r.recorded for role, r in decoder._runners().items()}
        self.started = time.perf_counter()
        self.engine = Engine(
            runner=target,
            cache=target.lease(self.batch, self.capacity + spare),
            shapes=shapes,
            chain=chain,
            rule=self.rule,
            sampling=self.sampling,
            rows=self.rows,
            batch=self.batch,
            vocab_size=target.vocab_size,
            reader=decoder.reader,
            kept=decoder._kept if keep else None,
            record=self.record,
            top=self.top,
            logprobs=self.settings.output_logprobs,
        )
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
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
        texts = [r.tokens.copy() if r is not None and r.error is None else _NOTHING for r in engine.slots]
        decoder._kept, decoder._kept_chain = KeptRows(engine.cache, texts), engine.chain

    def interrupt(self) -> None:
        """Mark every unfinished row."""
        for row in self.rows:
            row.abandon_round()
            if row.finish_reason is None:
                row.fail("interrupted")

    def raise_if_failed(self) -> None:
        """Raise when no row came through."""
        if self.rows and all(row.finish_reason == "error" for row in self.rows):
            raise SpecdecError(str(self.rows[0].error))

    def result(self) -> Generation:
        self.raise_if_failed()
        rows = self.rows
        return Generation(
            token_ids=[row.output for row in rows],
            texts=[row.text() for row in rows] if self.decoder.tokenizer is not None else None,
            finish_reasons=[str(row.finish_reason) for row in rows],
            stats=self.engine.stats(self.seconds, self.reads_before),
            provenance=self._provenance(),
            errors=[row.error for row in rows],
            logprobs=[row.logprobs for row in rows] if self.settings.output_logprobs else None,
            origins=[row.origins for row in rows],
            lossy=self.rule.lossy,
        )

    def _provenance(self) -> dict[str, Any]:
        decoder = self.decoder
        return {
            "versions": versions(),
            "devices": {role: device_name(r.device) for role, r in decoder._runners().items()},
            "dtypes": {role: str(r.dtype) for role, r in decoder._runners().items()},
            "weights": {role: h.get() for role, h in decoder._hashes.items()},
            "prompts": [hash_ids(row.prompt) for row in self.rows],
            "seed": self.settings.seed,
            "settings": {**self.settings.to_dict(), "acceptance": self.rule.name},
            "strategies": [{"name": d.name, **getattr(d, "parameters", dict)()} for d in self.drafters],
            "draft_length": ["auto" if a else "given" for a in self.automatic],
            "costs": None if self.costs is None else self.costs.to_dict(),
            "exact": self.exact,
            "compile": {role: r.compile_report(self.recorded_before[role]) for role, r in decoder._runners().items()},
            "batch": self.batch,
            "lossy": self.rule.lossy,
        }


_NOTHING = torch.zeros(0, dtype=torch.int64).numpy()


def _fresh_seed(seed: Any) -> Any:
    if isinstance(seed, (list, tuple)):
        return [_fresh_seed(s) for s in seed]
    return secrets.randbits(63) if seed is None else int(seed)


def _row_keys(settings: GenerationSettings, n_prompts: int) -> list[int]:
    """One key a row: int seed -> (seed, row); a list -> (seeds[prompt], which of its returned sequences)."""
    n = settings.num_return_sequences
    if not isinstance(settings.seed, list):
        return [row_key(settings.seed, i) for i in range(n_prompts * n)]
    if len(settings.seed) != n_prompts:
        raise SpecdecError(f"seed has {len(settings.seed)} entries for {n_prompts} prompts")
    return [row_key(seed, j) for seed in settings.seed for j in range(n)]
