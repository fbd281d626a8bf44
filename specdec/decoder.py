"""`SpeculativeDecoder`: two models, their runners, and calls of them (decoding/call.py)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdec.config import UNSET, GenerationSettings, check_exact, check_switch
from specdec.decoding import show
from specdec.decoding.acceptance import find_rule
from specdec.decoding.call import Call
from specdec.decoding.live import LiveCall, check_live
from specdec.decoding.prompts import TextStream, chat_rows, encode_prompts, plain_prompts, prompt_names
from specdec.decoding.provenance import hash_template
from specdec.decoding.result import Generation, Round
from specdec.decoding.validation import check_rule
from specdec.device.ambient import Steps, pinned
from specdec.device.graphs import check_compile
from specdec.device.host_read import HostReader
from specdec.device.memory import explaining, size
from specdec.device.ranks import Ranks
from specdec.drafters import make_drafters, tree_makers
from specdec.drafters.chain import Chain, upstream_order
from specdec.drafters.costs import as_costs
from specdec.errors import SpecdecError
from specdec.models.kv_cache import KeptRows, kv_dtype
from specdec.models.loading import LoadedPair, check_is_model, check_model_kind, check_modules
from specdec.models.quantised import is_quantised, rounds_activations
from specdec.models.runner import UNBOUNDED, Runner
from specdec.models.self_test import self_test
from specdec.models.state import ModelState


class SpeculativeDecoder:
    """A target model, perhaps a draft model, and a chain of strategies.

    target_model, draft_model: transformers causal language models, which are not changed
    tokenizer: for text prompts and texts
    draft_tokenizer: the draft's; None = the same
    strategies: names or configured drafters in priority order; None = `draft-model` with a draft, `prompt-lookup`
        without; [] = plain decoding
    attn_implementation: None = specdec's own, or "sdpa" / "eager"
    kv_cache_dtype: None or "auto" = keys and values in the models' dtypes; "fp8" (e4m3) or "fp8_e5m2" = in 8 bits, for
        another distribution (docs/models.md)
    exact: True, False or "auto" (docs/exactness.md)
    compile: how passes run (docs/speed.md); "auto" = as fast as each model allows: on a GPU "max", or "graph" for small
        models and those that cannot be compiled, and "off" elsewhere
    fuse: deprecated, as it is part of "max": True or False computes projections of one input together or apart
    check: run the self-test of the models (models/self_test.py)
    costs: a `specdec.CostTable` or its file, for automatic draft length; None = nominal (docs/automatic_length.md)
    Raises SpecdecError for a pair that cannot work and for a model whose ragged pass is not its plain pass.
    """

    @pinned()
    def __init__(
        self,
        target_model: Any,
        draft_model: Any = None,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        strategies: Any = None,
        *,
        attn_implementation: str | None = None,
        kv_cache_dtype: str | None = None,
        exact: Any = "auto",
        compile: str = "auto",
        fuse: bool | None = None,
        check: bool = True,
        costs: Any = None,
    ):
        check_exact(exact)
        check_compile(compile)
        check_fuse(fuse)
        check_switch("check", check)
        check_tokenizer(tokenizer, "tokenizer")
        check_tokenizer(draft_tokenizer, "draft_tokenizer")
        self._lock = threading.RLock()  # two threads' calls wait for one another
        self.costs = as_costs(costs)
        self.default_chain = strategies is None
        self.strategies = make_drafters(strategies, draft_model is not None)
        for model, role in ((target_model, "target"), (draft_model, "draft")):
            if model is not None or role == "target":
                check_is_model(model, role)
                check_model_kind(model.config, role, in_hand=hasattr(model, "generate"))
        translate = any(getattr(d, "translate", False) for d in self.strategies)
        self.report = check_modules(target_model, draft_model, tokenizer, draft_tokenizer, translate)
        self.report.kept_in = kv_dtype(kv_cache_dtype)
        run = partial(Runner, compile=compile, fuse=fuse, kv_cache_dtype=kv_cache_dtype)
        self.target = run(target_model, attn_implementation)
        self.draft = run(draft_model, attn_implementation) if draft_model is not None else None
        if self.draft is not None:
            self.draft.exclude(self.report.differing)
        self.tokenizer, self.draft_tokenizer = tokenizer, draft_tokenizer or tokenizer
        self.exact = exact
        self.ranks = Ranks.of(target_model)
        self.reader = self.target.reader = HostReader(self.ranks)
        if self.draft is not None:
            self.draft.reader = self.reader
        self._kept: KeptRows | None = None
        self._kept_chain: Chain | None = None
        self._kept_states: dict[str, ModelState] = {}
        if check:
            self._self_test()

    def _self_test(self) -> None:
        for role, runner in self._runners().items():
            if rounds_activations(runner.model) is None:  # a draft that rounds them has other passes, and may
                with explaining(runner.device, partial(self._self_test_would_fit, role)):
                    self_test(runner, role)

    def _self_test_would_fit(self, role: str, asked: int | None, free: int | None) -> str:
        weights = sum(model.weight_bytes for model in self.report.models)
        return (
            f"this was in the self-test of the {role}; weights take {size(weights)}. What takes less: a smaller model, "
            "or weights of fewer bits"
        )

    @classmethod
    @pinned()
    def from_pretrained(
        cls, target: str | Path, draft: str | Path | None = None, strategies: Any = None, **options: Any
    ) -> SpeculativeDecoder:
        """Load a pair by hub id, folder or GGUF file; options are those of `specdec.load_pair` and of this class."""
        names = ("exact", "compile", "fuse", "check", "costs")
        own = {name: options.pop(name) for name in names if name in options}
        check_exact(own.get("exact", "auto"))
        check_compile(own.get("compile", "auto"))
        if own.get("fuse") is not None:
            check_switch("fuse", own["fuse"])
        drafters = make_drafters(strategies, draft is not None)
        check_draft(drafters, draft)
        translate = any(getattr(d, "translate", False) for d in drafters)
        pair = LoadedPair.load(target, draft, translate=translate, **options)
        decoder = cls(
            pair.target,
            pair.draft,
            pair.tokenizer,
            pair.draft_tokenizer,
            strategies,
            **{name: options[name] for name in ("attn_implementation", "kv_cache_dtype") if name in options},
            **own,
        )
        decoder.report = pair.report
        return decoder

    def __repr__(self) -> str:
        return show.decoder_repr(self)

    def _repr_html_(self) -> str:
        return show.decoder_html(self)

    def _runners(self) -> dict[str, Runner]:
        return {role: r for role, r in (("target", self.target), ("draft", self.draft)) if r is not None}

    @property
    def host_reads(self) -> int:
        """Transfers from the device since this decoder was built."""
        return self.reader.count

    # -- public calls --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any = UNSET,
        max_new_tokens: int = 128,
        strategies: Any = UNSET,
        *,
        progress: Callable[[float], Any] | None = None,
        **options: Any,
    ) -> Generation:
        """Generate for one prompt or many. Options: `specdec.GenerationSettings`, field by field, and every processor
        field of transformers' GenerationConfig by its own name.

        progress: called after every pass with the share of the call that is done, from 0 to 1

        A KeyboardInterrupt ends the call early: finished tokens are returned, unfinished rows with reason
        `interrupted`. Raises SpecdecError for bad input before any work, and if every row fails.
        """
        if progress is not None and not callable(progress):
            raise SpecdecError(f"progress must be callable, got {progress!r}")
        with self.working():
            call = self._call(prompts, strategies, max_new_tokens=max_new_tokens, **options)
            call.is_fresh = True
            with call:
                try:
                    for _ in call.engine.run():
                        if progress is not None:
                            progress(call.done)
                except KeyboardInterrupt:
                    call.interrupt()
            return call.result()

    def stream(
        self, prompt: Any = UNSET, max_new_tokens: int = 128, strategies: Any = UNSET, **options: Any
    ) -> Iterator[str]:
        """Yield the text of one prompt, piece by piece; joined pieces equal `generate(...).texts[0]`."""
        if self.tokenizer is None:
            raise SpecdecError("stream needs a tokenizer: pass tokenizer=... when the decoder is built")
        call = self._single(prompt, "stream", strategies, max_new_tokens=max_new_tokens, **options)
        return Steps(self._pieces(call), self._lock)

    def rounds(
        self, prompt: Any = UNSET, max_new_tokens: int = 128, strategies: Any = UNSET, **options: Any
    ) -> Iterator[Round]:
        """Yield the rounds of one prompt, one `Round` at a time, with p and q at the drafted tokens."""
        call = self._single(prompt, "rounds", strategies, max_new_tokens=max_new_tokens, **options)
        call.record = True
        return Steps(self._each_round(call), self._lock)

    def live(self, slots: int = 8, capacity: int | None = None, strategies: Any = UNSET, **options: Any) -> LiveCall:
        """Open a call whose prompts come while it runs (decoding/live.py), with room for `slots` rows at a time.

        capacity: most tokens of a row, prompt and output together; None: the target's context, if it states one
        options: those of `generate`, of all its rows
        """
        check_live(options, slots, capacity)
        if capacity is None and self.target.context == UNBOUNDED:
            raise SpecdecError("live needs a capacity: the target's configuration does not say how long a text may be")
        call = self._call([], strategies, **options)
        return LiveCall(call, slots, self.target.context if capacity is None else capacity)

    def _pieces(self, call: Call) -> Iterator[str]:
        row = call.rows[0]
        text = TextStream(row.stops.stop_strings)
        with call:
            for _ in call.run():
                piece = text.piece(row.text()) if row.finish_reason is None else ""
                if piece:
                    yield piece
        call.raise_if_failed()
        call.warn(call.engine.stats(call.seconds, call.reads_before))
        rest = text.rest(row.text())
        if rest:
            yield rest

    def _each_round(self, call: Call) -> Iterator[Round]:
        with call:
            for rounds in call.run():
                yield from rounds
        call.warn(call.engine.stats(call.seconds, call.reads_before))

    # -- building a call -----------------------------------------------------------------------------------------

    def _single(self, prompt: Any, verb: str, strategies: Any, **options: Any) -> Call:
        call = self._call(prompt, strategies, **options)
        if len(call.rows) != 1:
            raise SpecdecError(f"{verb} takes one prompt, got {len(call.rows)} rows")
        return call

    @contextmanager
    def working(self) -> Iterator[None]:
        """Give this thread the decoder to itself, with torch's ambient modes set to specdec's (device/ambient.py)."""
        with self._lock, pinned():
            yield

    def refresh(self) -> None:
        """Follow changes of the models since the last call."""
        for runner in self._runners().values():
            runner.refresh()

    def _call(self, prompts: Any, strategies: Any, **options: Any) -> Call:
        with self.working():
            return self._made_call(prompts, strategies, options)

    def _made_call(self, prompts: Any, strategies: Any, options: dict[str, Any]) -> Call:
        self.refresh()
        settings = GenerationSettings.parse(options)
        drafters = self.strategies if strategies is UNSET else make_drafters(strategies, self.draft is not None)
        check_draft(drafters, self.draft)
        for name in tree_makers(drafters):
            for runner in self._runners().values():
                runner.check_trees(name)
        check_rule(find_rule(settings.acceptance), drafters)
        if settings.order == "upstream":
            drafters = upstream_order(drafters)
        names, prompts = prompt_names(prompts), plain_prompts(prompts, self.tokenizer)
        encoded = encode_prompts(prompts, self.tokenizer, self.target.vocab_size, self.target.context, names)
        template = hash_template(self.tokenizer)
        templates = [template if chat else None for chat in chat_rows(prompts)]
        default = self.default_chain if strategies is UNSET else strategies is None
        return Call(self, settings, drafters, encoded, default, templates)

    def resolve_exact(self, choice: Any, drafters: Sequence[Any] = ()) -> bool:
        """True if a call runs with fixed shapes.

        "auto" = for chains, and dense models on a GPU that are in half precision or keep keys and values in 8 bits.

        Raises SpecdecError if `choice` is True and exact mode does not cover the target or a drafter.
        """
        choice = self.exact if choice is UNSET else choice
        outside = self._outside_exact(drafters)
        if choice == "auto":
            coarse = self.target.dtype in (torch.bfloat16, torch.float16) or self.target.pool.kept_in is not None
            return self.target.device.type == "cuda" and coarse and outside is None and not self._has_experts
        if choice and outside is not None:
            raise SpecdecError(f"exact=True does not cover {outside}")
        return bool(choice)

    @property
    def _has_experts(self) -> bool:
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        return any(getattr(self.target.config, name, None) for name in counts)

    def _outside_exact(self, drafters: Sequence[Any]) -> str | None:
        """Return what a token's logits would depend on beside its own text, in words; None: nothing."""
        trees, processes = tree_makers(drafters), self.ranks.size
        # Experts that are one batched product per token see no other tokens; other implementations group tokens.
        grouped = self._has_experts and getattr(self.target.config, "_experts_implementation", None) != "batched_mm"
        causes = {
            f"trees, which strategy {(trees or [''])[0]!r} can make: an ancestor in another slot changes the order of "
            "summation": trees,
            "recurrent layers: they read rows in parts of any length": self.target.recurrence is not None,
            "quantised models: their kernels have not been measured": is_quantised(self.target.model),
            # Two numbers have one sum in either order; of more, the order depends on the place in the pass.
            f"tensor parallel over {processes} processes: the order in which more than two parts are summed depends on "
            "a token's place in the pass": processes > 2,
            "mixture-of-experts models that group tokens by expert: their passes depend on what else is in them; "
            'model.set_experts_implementation("batched_mm") makes them independent': grouped,
        }
        return next((cause for cause, applies in causes.items() if applies), None)


def check_fuse(value: Any) -> None:
    """Raise SpecdecError for no switch; warn of a deprecated option."""
    if value is not None:
        check_switch("fuse", value)
        warnings.warn("fuse is deprecated: compile='auto' and 'max' fuse projections", DeprecationWarning, stacklevel=4)


def check_tokenizer(value: Any, name: str) -> None:
    """Raise SpecdecError unless `value` is None or decodes."""
    if value is not None and not hasattr(value, "decode"):
        raise SpecdecError(f"{name} must be a tokenizer, as AutoTokenizer loads them, got {type(value).__name__}")


def check_draft(drafters: Sequence[Any], draft: Any) -> None:
    """Raise SpecdecError for a chain that needs a draft model if there is none."""
    if draft is None and any(d.uses_draft_model for d in drafters):
        raise SpecdecError("strategy 'draft-model' needs a draft model: pass draft=... when the decoder is built")
