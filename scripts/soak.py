"""Run random requests, compare every text with one made in another way, and watch the memory. Meant for the night.

    python scripts/soak.py --minutes 60 --out results/soak_cpu.json     the embedded pair; memory must stay flat
    python scripts/soak.py --fuzz 100000                                tiny models: caches, trees, acceptance
    python scripts/soak.py --case 4711            one request of the first again, alone; with --fuzz 1 of the second

A case follows from its seed alone. It has prompts of any length, a chain of strategies, a rule, a temperature, stops,
a batch size and processors; it is a call, a generator that may be closed before its end, or a live call. Its texts are
compared with

    reference   specdec/reference.py: without a cache, one row at a time
    plain       the engine without drafts, where the rule promises plain decoding's text
    alone       the same call with every row in a batch of its own, where drafts decide what is sampled

Models are float64, so that no two ways of computing a token differ by rounding. Exit status 1: a text differs, a call
failed, or the resident memory has grown by more than 2 % after the first fifth of the time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec import Draft, Drafter, DraftModel, SpecdecError, SpeculativeDecoder, reference
from specdec.cli import terminating
from specdec.decoding.acceptance import find_rule
from specdec.demo_models import head_path
from specdec.drafters import make_drafters, tree_makers
from specdec.files.compact_json import write_json
from specdec.models.trees import depths_of
from specdec.research.bench import origin

MOST_GROWTH = 0.02
WARM_UP = 0.2  # share of the time before which memory is not looked at
MOST_FAULTS = 20
SAMPLED_EVERY = 5  # cases between two looks at the memory
RULES = ("leviathan", "match", "coupled", "block", "specinfer", "gumbel-list", "eagle")
BY_MATCH = ("leviathan", "block", "specinfer")  # rules that judge a draft without a q by `match`
GUESSES = "guesses"
CHAINS = (
    "draft-model:n_max={k}", "draft-model:n_max={k}", "draft-model:n_max={k}:p_min=0.3", "draft-model:tree=2x2x1",
    "draft-model:branches=2:n_max={k}", "draft-model:tree=opt-12:n_max=5", "prompt-lookup:n_max={k}",
    "suffix:n_max={k}", "recycling:nodes=12:width=3:depth=4", "lookahead:window=4:ngram=3:guesses=3",
    "ngram-simple:size_n=2:size_m={k}", "ngram-map-k:size_n=3:size_m={k}:parity=false", "ngram-cache:n_draft={k}",
    "ngram-mod:n_match=3:n_min=1:n_max={k}:table_size=4096", "early-exit:layers=1:n_max={k}", GUESSES,
)  # fmt: skip
Row = tuple[list[int], str | None, str | None]  # ids, why they end, their text; None: reference.py does not say


@dataclass(frozen=True)
class Space:
    """What cases are made of.

    texts: token ids that prompts are cut from
    longest_prompt, longest_text: in tokens
    context: the target's; longer prompts must be refused
    vocab: the target's ids
    stops: strings that may end a text
    chains: strategies; {k} stands for a length
    rows: numbers of prompts
    """

    texts: Sequence[Sequence[int]]
    longest_prompt: int
    longest_text: int
    context: int
    vocab: int
    stops: Sequence[str] = ()
    chains: Sequence[str] = CHAINS
    rows: Sequence[int] = (1, 1, 2, 3, 5)


@dataclass(frozen=True)
class Case:
    """A request. options: of `generate`; closed: a generator is closed after so many steps; too_long: the first prompt
    does not fit into the context; live: prompts come, and rows are cancelled, while the call runs."""

    seed: int
    prompts: list[list[int]]
    strategies: list[str]
    options: dict[str, Any]
    closed: int | None = None
    too_long: bool = False
    live: bool = False

    @property
    def is_plain_sampling(self) -> bool:
        """True if reference.py has all that the call asks for."""
        return not {"stop_strings", "top_k", "top_p", "repetition_penalty"} & set(self.options)


def make_case(seed: int, space: Space) -> Case:
    """Make the case of a seed."""
    dice = random.Random(seed)

    def length(most: int) -> int:  # short ones are as frequent as long ones
        return int(most ** dice.random())

    chosen = dice.sample(space.chains, dice.choice((0, 1, 1, 1, 2, 3)))
    chain = [name.format(k=dice.choice((1, 2, 3, 4, 7, 20))) for name in chosen]
    rule = dice.choice(RULES)
    if rule == "block":  # judges chains alone
        chain = [c for c in chain if c != GUESSES and not tree_makers(make_drafters([c], True))]
    closed = length(space.longest_text) if dice.random() < 0.2 else None
    rows = 1 if closed else dice.choice(space.rows)
    prompts = [_cut(dice, space, length(space.longest_prompt)) for _ in range(rows)]
    options: dict[str, Any] = {
        "max_new_tokens": length(space.longest_text),
        "temperature": dice.choice((0.0, 0.0, 0.4, 0.8, 1.0, 1.4)),
        "acceptance": rule,
        "batch_size": dice.choice((1, 3, 4, 8, 16)),
        "seed": [dice.randrange(1 << 31) for _ in prompts],
        "eos_token_id": dice.sample(range(space.vocab), dice.choice((1, 2))) if dice.random() < 0.3 else None,
    }
    extra = {"top_k": 5, "top_p": 0.8, "repetition_penalty": 1.3}
    options |= {name: value for name, value in extra.items() if dice.random() < 0.1}
    if space.stops and dice.random() < 0.3:
        options["stop_strings"] = [dice.choice(space.stops)]
    if find_rule(rule).keeps_text(options["temperature"] == 0):  # else they decide what is drafted, and so the text
        others = {"keep_state": True, "draft_length": "auto"}
        options |= {name: value for name, value in others.items() if dice.random() < 0.15}
    too_long = dice.random() < 0.02
    if too_long:
        prompts[0] = _cut(dice, space, space.context + 1)
    live = not (closed or too_long or {"keep_state", "draft_length"} & set(options)) and dice.random() < 0.2
    return Case(seed, prompts, chain, options, closed, too_long, live)


def _cut(dice: random.Random, space: Space, n: int) -> list[int]:
    """A piece of a text, repeated as often as it takes."""
    text = dice.choice(space.texts)
    start = dice.randrange(len(text))
    piece = list(text[start : start + n])
    return (piece * (n // len(piece) + 1))[:n]


@dataclass
class Guesses(Drafter):
    """Proposes chains and trees of any shape whose tokens are often right.

    texts: prompts with their plain texts; seed: decides, with the text so far, what is proposed
    """

    name = GUESSES
    runs_a_model, makes_trees = False, True
    texts: Sequence[Sequence[int]] = ()
    seed: int = 0
    vocab: int = 0

    def draft(self, requests: Sequence[Any]) -> list[Draft]:
        return [self._one([*map(int, r.tokens), int(r.last)]) for r in requests]

    def _one(self, known: list[int]) -> Draft:
        dice = random.Random(f"{self.seed}/{known}")
        right = next((list(t[len(known) :]) for t in self.texts if list(t[: len(known)]) == known), [])
        size, straight = dice.randrange(25), dice.choice((0.5, 0.9, 1.0))
        parents = [i - 1 if dice.random() < straight else dice.randrange(-1, i) for i in range(size)]
        likely = dice.choice((0.5, 0.9, 1.0))
        depths = [d - 1 for d in depths_of(parents)]
        good = [d < len(right) and dice.random() < likely for d in depths]
        tokens = [right[d] if g else dice.randrange(self.vocab) for d, g in zip(depths, good, strict=True)]
        return Draft(tokens, None if straight == 1.0 else parents)


@dataclass(frozen=True)
class Subject:
    """A decoder and what its cases are made of. every_reference: reference.py is quick enough for every case."""

    decoder: SpeculativeDecoder
    space: Space
    every_reference: bool

    def drafters(self, case: Case, texts: Sequence[Row]) -> list[Any]:
        """The chain of a case; texts: the plain ones."""
        whole = [[*prompt, *ids] for prompt, (ids, *_) in zip(case.prompts, texts, strict=True)]
        guesses = Guesses(texts=whole, seed=case.seed, vocab=self.space.vocab)
        return make_drafters([guesses if name == GUESSES else name for name in case.strategies], True)


# -- what a case must give ---------------------------------------------------------------------------------------------


def check(subject: Subject, case: Case) -> tuple[str, int]:
    """Run a case; returns what it was compared with, and its tokens. Raises AssertionError for another text, and
    whatever a call raises that should not have failed."""
    if case.too_long:
        try:
            generated(subject, case, [])
        except SpecdecError:
            return "refused", 0
        raise AssertionError("a prompt longer than the context was accepted")
    plain = reference_texts(subject, case, 0) if _cheap(subject, case) else generated(subject, case, [])
    kind, wanted = expected(subject, case, plain)
    chain = subject.drafters(case, plain)
    if case.closed is not None:
        return kind, _check_closed(subject, case, chain, wanted[0])
    found = (live if case.live else generated)(subject, case, chain)
    for row, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if got[1] == "interrupted":
            assert got[0] == want[0][: len(got[0])], f"row {row}, cancelled, is {got[0]}, {kind}: {want[0]}"
            continue
        differs = [(a, b) for a, b in zip(got, want, strict=True) if b is not None and a != b]
        assert not differs, f"row {row} is {differs[0][0]!r}, {kind}: {differs[0][1]!r}"
        _check_end(case, *got[:2])
    return kind, sum(len(ids) for ids, *_ in found)


def _cheap(subject: Subject, case: Case) -> bool:
    return subject.every_reference and case.is_plain_sampling


def expected(subject: Subject, case: Case, plain: list[Row]) -> tuple[str, list[Row]]:
    """What a case is compared with, by name, and its rows."""
    rule, chain = find_rule(case.options["acceptance"]), subject.drafters(case, plain)
    without_q = rule.name in BY_MATCH and not any(d.runs_a_model for d in chain)
    if rule.keeps_text(case.options["temperature"] == 0) or without_q or not chain:
        return ("reference" if _cheap(subject, case) else "plain"), plain
    only = chain[0] if len(chain) == 1 and case.is_plain_sampling else None
    if rule.name == "leviathan" and isinstance(only, DraftModel) and only == DraftModel(n_max=only.n_max):
        return "reference", reference_texts(subject, case, only.n_max or 0)
    return "alone", generated(subject, case, chain, alone=True)


def reference_texts(subject: Subject, case: Case, k: int) -> list[Row]:
    """Rows by specdec/reference.py; k = 0: plain decoding."""
    decoder, given = subject.decoder, case.options
    rule = given["acceptance"] if k else "match"
    return [
        (
            reference.generate(
                decoder.target.model, decoder.draft.model, prompt, _room(subject, case, prompt), k=k, rule=rule,
                temperature=given["temperature"], seed=seed, eos=given["eos_token_id"] or (),
            ),
            None,
            None,
        )
        for prompt, seed in zip(case.prompts, given["seed"], strict=True)
    ]  # fmt: skip


def _room(subject: Subject, case: Case, prompt: Sequence[int]) -> int:
    return min(int(case.options["max_new_tokens"]), subject.space.context - len(prompt))


def generated(subject: Subject, case: Case, chain: Sequence[Any], alone: bool = False) -> list[Row]:
    """Rows by the engine; alone: each in a call of its own."""
    calls = [slice(i, i + 1) for i in range(len(case.prompts))] if alone else [slice(None)]
    rows: list[Row] = []
    for part in calls:
        options = {**case.options, "seed": case.options["seed"][part]}
        out = subject.decoder.generate(case.prompts[part], strategies=list(chain), **options)
        if "interrupted" in out.finish_reasons:  # `generate` gives what is there, and the run must end
            raise KeyboardInterrupt
        rows += zip(out.token_ids, out.finish_reasons, out.texts or [None] * len(out), strict=True)
    return rows


def live(subject: Subject, case: Case, chain: Sequence[Any]) -> list[Row]:
    """Rows of a call to which prompts come at any time, and in which some are cancelled: `interrupted`."""
    dice, rows = random.Random(case.seed), list[Any]()
    waiting = list(zip(case.prompts, case.options["seed"], strict=True))
    options = {name: value for name, value in case.options.items() if name not in ("seed", "batch_size")}
    room = max(map(len, case.prompts)) + case.options["max_new_tokens"]
    with subject.decoder.live(case.options["batch_size"], room, list(chain), **options) as call:
        while waiting or call.rows:
            while waiting and dice.random() < 0.5:
                prompt, seed = waiting.pop()
                rows.insert(0, call.add(prompt, seed))
            if call.rows and dice.random() < 0.05:
                call.cancel(dice.choice(call.rows))
            call.step()
    texts = [row.text() for row in rows] if subject.decoder.tokenizer is not None else [None] * len(rows)
    return [(list(row.output), row.finish_reason, text) for row, text in zip(rows, texts, strict=True)]


def _check_closed(subject: Subject, case: Case, chain: Sequence[Any], want: Row) -> int:
    """Compare a generator that is closed, or just left, before its end; returns how much it gave. A stream of text
    where the text is known, else rounds."""
    decoder, text = subject.decoder, want[2] if case.seed % 2 else None
    open_one: Callable[..., Any] = decoder.rounds if text is None else decoder.stream
    steps = open_one(case.prompts[0], strategies=list(chain), **case.options)
    wanted, found = list(want[0] if text is None else text), list[Any]()
    for step, piece in enumerate(steps, 1):
        found += piece if text is not None else piece.tokens
        if step == case.closed:
            if case.seed % 3:
                steps.close()
            break
    else:
        assert found == wanted, f"it gave {found}, expected {want}"
    assert found == wanted[: len(found)], f"it gave {found} before its end, expected {want}"
    return len(found)


def _check_end(case: Case, ids: Sequence[int], reason: str | None) -> None:
    eos, most = set(case.options["eos_token_id"] or ()), case.options["max_new_tokens"]
    assert not eos & set(ids[:-1]), f"tokens follow an EOS: {ids}"
    assert (reason == "eos") == bool(eos & set(ids[-1:])), f"ended by {reason!r}: {ids}"
    assert reason != "length" or len(ids) == most, f"{len(ids)} of {most} tokens, ended by {reason!r}"
    assert len(ids) <= most, f"{len(ids)} tokens, {most} were allowed"


# -- subjects ----------------------------------------------------------------------------------------------------------


class TinyLayer(nn.Module):
    """Attention over everything before, added to its input. One head."""

    layer_idx: int
    is_causal, num_key_value_groups = True, 1

    def __init__(self, config: LlamaConfig, index: int):
        super().__init__()
        self.config, self.layer_idx, self.scaling = config, index, config.hidden_size**-0.5
        self.mix = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=False)

    def forward(self, states: Tensor, attention_mask: Any = None, past_key_values: Any = None, **_: Any) -> Tensor:
        query, key, value, own = (part[:, None] for part in self.mix(states).chunk(4, dim=-1))  # [B, 1, S, H]
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, ALL_ATTENTION_FUNCTIONS["sdpa"])
        seen = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0)[0]  # [B, S, 1, H]
        return states + torch.tanh(seen[:, :, 0] + own[:, 0])


class Tiny(PreTrainedModel, GenerationMixin):
    """A language model whose pass is a few operations: of the time of a case it takes little."""

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(TinyLayer(config, i) for i in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        states = self.embed(input_ids) + self.places(position_ids)  # [B, S, H]
        for layer in self.layers:
            states = layer(states, attention_mask=attention_mask, past_key_values=past_key_values)
        return CausalLMOutputWithPast(logits=self.head(states[:, -logits_to_keep:]))


def tiny(seed: int = 0) -> Subject:
    """Two random models of 24 ids, of which the second is the first with noise on its weights."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = LlamaConfig(vocab_size=24, max_position_embeddings=64, attn_implementation="sdpa", **sizes, **ids)
    generator = torch.Generator().manual_seed(seed)
    target, draft = (Tiny(config).double().eval() for _ in range(2))
    for mine, other in zip(target.parameters(), draft.parameters(), strict=True):
        mine.data = 0.8 * torch.randn(mine.shape, dtype=mine.dtype, generator=generator)
        other.data = mine + 0.1 * torch.randn(mine.shape, dtype=mine.dtype, generator=generator)
    dice = random.Random(seed)
    texts = [[dice.randrange(24) for _ in range(n)] for n in (3, 7, 40)]
    return Subject(SpeculativeDecoder(target, draft), Space(texts, 40, 20, 64, 24, rows=(1, 4, 8, 16)), True)


def embedded() -> Subject:
    """The embedded pair, with an EAGLE-3 head, on files of Python's library."""
    decoder = SpeculativeDecoder.from_pretrained(
        "demo-target", "demo-draft", dtype="float64", draft_dtype="float64", device="cpu"
    )
    files = sorted(Path(random.__file__).parent.glob("*.py"))[:20]
    texts = [decoder.tokenizer(file.read_text(encoding="utf-8")[:6000])["input_ids"] for file in files]
    heads = (f"eagle3:head={head_path()}:n_max=4", f"eagle3:head={head_path()}:nodes=8")
    stops = ("\n\n", ":", "self", "return", "    def", ")")
    space = Space(texts, 300, 64, decoder.target.context, decoder.target.vocab_size, stops, (*CHAINS, *heads))
    return Subject(decoder, space, False)


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What has run so far. memory: (seconds, resident bytes) after every few cases."""

    cases: int = 0
    closed: int = 0
    live: int = 0
    rows: int = 0
    tokens: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    strategies: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def add(self, subject: Subject, case: Case) -> None:
        """Run and count a case; what is wrong goes to `faults`."""
        self.cases += 1
        self.rows += len(case.prompts)
        self.closed += case.closed is not None
        self.live += case.live
        try:
            kind, tokens = check(subject, case)
        except Exception as error:
            fault = {"case": case.seed, "error": f"{type(error).__name__}: {error}", **asdict(case)}
            print(f"case {case.seed}: {fault['error']}\n{json.dumps(asdict(case))}", file=sys.stderr, flush=True)
            self.faults.append(fault)
            return
        self.tokens += tokens
        self.compared[kind] += 1
        self.rules[case.options["acceptance"]] += 1
        self.strategies.update(name.split(":")[0] for name in case.strategies or ("plain",))

    def growth(self, seconds: float) -> dict[str, Any]:
        """Resident memory after the warm-up: a line fitted to it. growth: of the whole time, as a share."""
        found = np.array([(t, b / 1e6) for t, b in self.memory if t >= WARM_UP * seconds]).reshape(-1, 2)
        if len(found) < 10:
            return {"samples": len(found)}
        slope, start = np.polyfit(found[:, 0], found[:, 1], 1)
        first, last = (start + slope * found[i, 0] for i in (0, -1))
        made = {"first_mb": first, "last_mb": last, "highest_mb": found[:, 1].max(), "slope_mb_per_hour": 3600 * slope}
        return {"samples": len(found), **{k: round(float(v), 2) for k, v in made.items()}, "growth": last / first - 1}

    def to_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("cases", "closed", "live", "rows", "tokens")}
        counters = {n: dict(sorted(getattr(self, n).items())) for n in ("compared", "rules", "strategies")}
        return {**counts, **counters, "faults": self.faults}


def resident(decoder: SpeculativeDecoder) -> int:
    """Bytes of this process that are in memory, without caches that wait for the next call, which are of any size."""
    for runner in decoder._runners().values():
        runner.pool.idle = None
    decoder._kept = decoder._kept_chain = None
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library keeps what was freed
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(subject: Subject, seeds: Iterator[int], goes_on: Callable[[Tally, float], bool]) -> tuple[Tally, float]:
    """Run cases until `goes_on(tally, seconds)` is false, or too many are wrong; Ctrl-C and SIGTERM end it as well.
    Returns what was counted, and the seconds that it took."""
    tally, started = Tally(), time.monotonic()
    try:
        with terminating([]), warnings.catch_warnings(action="ignore"):  # random settings are not wise ones
            while goes_on(tally, time.monotonic() - started) and len(tally.faults) < MOST_FAULTS:
                tally.add(subject, make_case(next(seeds), subject.space))
                if tally.cases % SAMPLED_EVERY == 0:
                    tally.memory.append((time.monotonic() - started, resident(subject.decoder)))
    except KeyboardInterrupt:
        print("interrupted: the summary is of the cases so far", file=sys.stderr)
    return tally, time.monotonic() - started


def main() -> int:
    """Run what is asked for, print the summary and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the embedded pair is run")
    parser.add_argument("--fuzz", type=int, metavar="N", help="N rows of tiny models instead")
    parser.add_argument("--case", type=int, help="only the case of this seed")
    parser.add_argument("--seed", type=int, help="of the first case; new ones every time if it is left out")
    parser.add_argument("--out", type=Path, help="write the summary to this JSON file")
    given = parser.parse_args()
    subject = tiny() if given.fuzz else embedded()
    if given.case is not None:
        case = make_case(given.case, subject.space)
        print(json.dumps(asdict(case)))
        print(*check(subject, case))
        return 0
    first = random.SystemRandom().randrange(1 << 40) if given.seed is None else given.seed
    print(f"cases {first}, {first + 1}, ...", file=sys.stderr)
    limit = 60 * given.minutes
    goes_on = (lambda t, _: t.rows < given.fuzz) if given.fuzz else (lambda _, seconds: seconds < limit)
    tally, seconds = run(subject, iter(range(first, 1 << 62)), goes_on)
    result = {"benchmark": "soak", **origin(), "kind": "fuzz" if given.fuzz else "embedded pair", "first_case": first}
    result |= {"seconds": round(seconds, 1), **tally.to_dict(), "memory": tally.growth(seconds)}
    print(json.dumps(result, indent=1))
    if given.out is not None:
        write_json(given.out, result)
    grown = not given.fuzz and result["memory"].get("growth", 0.0) > MOST_GROWTH
    return int(bool(tally.faults) or grown)


if __name__ == "__main__":
    raise SystemExit(main())
