"""Measure the n-gram strategies: what they cost, and what they and their parity switches get accepted.

    python scripts/measure_ngrams.py cost --out results/ngram_cost.json
    python scripts/measure_ngrams.py acceptance --out results/ngram_acceptance.json
    python scripts/write_results.py

Both work on the kept greedy texts of Spec-Bench prompts (scripts/write_greedy_texts.py) and need no model. Costs are
wall-clock times of one row on one core. Acceptance is exact: a greedy text does not depend on the drafter.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec import NgramCache, NgramMapK, NgramMapK4V, NgramMod, NgramSimple, PromptLookup, Suffix, SuffixStore
from specdec.drafters.base import DraftContext, DraftRequest
from specdec.drafters.chain import Chain, build_chain
from specdec.files.compact_json import write_json
from specdec.models.kv_cache import common_prefix
from specdec.research.bench import origin
from specdec.research.bootstrap import DRAWS, difference
from specdec.research.offline.replay import Text, load_texts, replay

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {
    "SmolLM2-135M": ROOT / "results" / "texts_smollm2.npz",
    "embedded target": ROOT / "results" / "texts_embedded.npz",
}
CAP = 8  # most tokens a round drafts, the same for all
CONTEXTS = (2_048, 8_192, 32_768, 131_072)
ROUNDS = 400
SLOTS = 4
Make = Callable[[], Any]

COSTED: dict[str, Make] = {
    made.name: made for made in (NgramSimple, NgramMapK, NgramMapK4V, NgramMod, NgramCache, PromptLookup, Suffix)
}
# Upstream's defaults ask for long n-grams and long drafts; the short ones are what a cap of 8 calls for.
COMPARED: dict[str, Make] = {
    "suffix": Suffix,
    "prompt-lookup": lambda: PromptLookup(n_max=CAP),
    "prompt-lookup:ngram_max=10": lambda: PromptLookup(n_max=CAP, ngram_max=10),
    "prompt-lookup:match=earliest": lambda: PromptLookup(n_max=CAP, match="earliest"),
    "ngram-simple": NgramSimple,
    "ngram-simple:size_n=2": lambda: NgramSimple(2, CAP),
    "ngram-map-k": NgramMapK,
    "ngram-map-k:size_n=2": lambda: NgramMapK(2, CAP),
    "ngram-map-k4v": NgramMapK4V,
    "ngram-map-k4v:size_n=2": lambda: NgramMapK4V(2, CAP),
    "ngram-mod": NgramMod,
    "ngram-mod:n_match=3": lambda: NgramMod(3, 1, CAP),
    "ngram-cache": NgramCache,
    "ngram-map-k:size_n=2:parity=false": lambda: NgramMapK(2, CAP, parity=False),
    "ngram-map-k4v:size_n=2:parity=false": lambda: NgramMapK4V(2, CAP, parity=False),
    "ngram-mod:n_match=3:parity=false": lambda: NgramMod(3, 1, CAP, parity=False),
    "ngram-cache:parity=false": lambda: NgramCache(parity=False),
}
SWITCHED: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "ngram-map-k": (
        NgramMapK,
        {"size_n": 3, "size_m": CAP, "min_hits": 2},
        ("fix_ratchet", "fix_blind_spot", "fix_begin", "fix_min_hits"),
    ),
    "ngram-map-k4v": (NgramMapK4V, {"size_n": 3, "size_m": CAP}, ("fix_ratchet", "fix_blind_spot", "fix_begin")),
    "ngram-mod": (
        NgramMod,
        {"n_match": 6, "n_min": 1, "n_max": CAP, "table_size": 65_536},
        ("fix_wipe", "fix_occupancy"),
    ),
    "ngram-cache": (NgramCache, {}, ("fix_boundaries", "fix_begin")),
}


def new_chain(drafter: Any, rows: int = 1) -> Chain:
    return build_chain([drafter], DraftContext(rows, 1 << 20, 1 << 31))


# -- cost ------------------------------------------------------------------------------------------------------------


def measure_cost() -> dict[str, Any]:
    """Per strategy and context: milliseconds to index, microseconds of draft + accept a round, bytes."""
    texts = load_texts(TEXTS["SmolLM2-135M"])
    stream = np.concatenate([np.concatenate([t.prompt, t.output]) for t in texts])
    table: dict[str, Any] = {}
    for name, make in COSTED.items():
        table[name] = {str(size): _cost(make, stream, size) for size in CONTEXTS}
        print(name, {k: (round(v["index_ms"], 2), round(v["round_us"], 1)) for k, v in table[name].items()}, flush=True)
    return {"rounds": ROUNDS, "cap": CAP, "strategies": table, "memory": _memory(stream)}


def _cost(make: Make, stream: np.ndarray, size: int) -> dict[str, float]:
    index_ms = []
    for _ in range(5):
        drafter = make()
        started = time.perf_counter()
        drafter.begin(0, stream[:size])
        drafter.draft([DraftRequest(0, stream[:size], int(stream[size]), CAP, size)])
        index_ms.append(1e3 * (time.perf_counter() - started))
    times, at = [], size + 1
    for _ in range(ROUNDS):
        started = time.perf_counter()
        [draft] = drafter.draft([DraftRequest(0, stream[:at], int(stream[at]), CAP, at)])
        accepted = common_prefix(np.array(draft.tokens[:CAP], dtype=np.int64), stream[at + 1 :])
        drafter.accept(0, accepted, False)
        times.append(1e6 * (time.perf_counter() - started))
        at += accepted + 1
    deciles = statistics.quantiles(times, n=10)
    return {"index_ms": statistics.median(index_ms), "round_us": statistics.median(times), "round_us_p90": deciles[-1]}


def _memory(stream: np.ndarray) -> dict[str, float]:
    tokens = 32_768
    live = Suffix()
    live.begin(0, stream[:tokens])
    store = SuffixStore([stream[:tokens]])
    store.freeze()
    return {
        "ngram_mod_table_bytes": NgramMod().nbytes,
        "suffix_live_bytes_per_token": live.row_bytes(0) / tokens,
        "suffix_frozen_bytes_per_token": store.nbytes / store.size,
    }


# -- acceptance ------------------------------------------------------------------------------------------------------


def measure_acceptance() -> dict[str, Any]:
    """Tokens per round of every strategy by category, and of every switch."""
    models = {}
    for model, path in TEXTS.items():
        texts = [t for t in load_texts(path) if len(t.output)]
        models[model] = {"strategies": _compare(texts), "switches": _switches(texts), "texts": len(texts)}
    return {"cap": CAP, "new_tokens": 128, "slots": SLOTS, "resamples": DRAWS, "models": models}


def loops(output: np.ndarray, span: int = 48, longest: int = 16) -> bool:
    """Whether the last `span` tokens repeat with a period of at most `longest`."""
    tail = output[-span:]
    return len(tail) == span and any((tail[p:] == tail[:-p]).all() for p in range(1, longest + 1))


def _compare(texts: Sequence[Text]) -> dict[str, Any]:
    groups = [t.category if not loops(t.output) else "(looped outputs)" for t in texts]
    rounds: dict[str, np.ndarray] = {}
    for name, make in COMPARED.items():
        rounds[name] = np.array([len(replay(new_chain(make()), t.prompt, t.output, CAP)) for t in texts])
        print(name, round(sum(len(t.output) for t in texts) / rounds[name].sum(), 3), flush=True)
    tokens = np.array([len(t.output) for t in texts])
    return {
        "all": _group(tokens, rounds, np.ones(len(texts), dtype=bool)),
        "categories": {c: _group(tokens, rounds, np.array([g == c for g in groups])) for c in dict.fromkeys(groups)},
    }


def _group(tokens: np.ndarray, rounds: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, Any]:
    """Tokens per round, and suffix's lead over the best other strategy with a paired bootstrap over the prompts."""
    own = {name: r[chosen] for name, r in rounds.items()}
    t = tokens[chosen]
    figures = {name: float(t.sum() / r.sum()) for name, r in own.items()}
    best = max((name for name in own if name != "suffix"), key=figures.__getitem__)
    found = difference((t.tolist(), own["suffix"].tolist()), (t.tolist(), own[best].tolist()))
    lead = {"over": best, "lead": found.value, "low": found.low, "high": found.high}
    return {"prompts": int(chosen.sum()), "tokens_per_round": figures, "suffix_lead": lead}


def _switches(texts: Sequence[Text]) -> dict[str, Any]:
    """One chain for all prompts, in `SLOTS` slots that are filled again and again, as in a server."""
    table: dict[str, Any] = {}
    for name, (kind, options, switches) in SWITCHED.items():
        variants = {"parity": {}, **{switch: {switch: True} for switch in switches}, "parity=False": {"parity": False}}
        table[name] = {"options": options, "variants": {}}
        for variant, extra in variants.items():
            chain, records = new_chain(kind(**options, **extra), SLOTS), []
            for i, text in enumerate(texts):
                records += replay(chain, text.prompt, text.output, CAP, row=i % SLOTS)
            accepted, drafted = sum(r.accepted for r in records), sum(r.drafted for r in records)
            table[name]["variants"][variant] = {
                "accepted": accepted,
                "drafted": drafted,
                "tokens_per_round": 1 + accepted / len(records),
            }
            print(name, variant, accepted, drafted, flush=True)
    return table


def main() -> None:
    """Measure and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "acceptance"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="ngram-mod")  # short n-grams on purpose
    measured = measure_cost() if arguments.what == "cost" else measure_acceptance()
    result = {"benchmark": f"ngram {arguments.what}", **origin(), **measured}
    write_json(arguments.out, result)


if __name__ == "__main__":
    main()
