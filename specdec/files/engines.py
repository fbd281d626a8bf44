"""What a chain is in the options of serving engines: data for `specdec export`.

The names are those of vLLM at commit 002e77c1 (vllm/config/speculative.py), of SGLang at commit 004c82e0
(srt/arg_groups/speculative_hook.py; flags as in docs/advanced_features/speculative_decoding.md, fc6d4653), and of
llama.cpp at commit 00dc8057 (tools/server/README.md). What is not here has no counterpart that is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Ways = Mapping[str, tuple[str, Mapping[str, str]]]


class Engine(NamedTuple):
    """An engine's options.

    version: where the names are from
    command: what starts a server, up to the target's name
    method: the option that names a strategy
    ways: strategy -> its name in the engine, and its options -> theirs; `draft...` are the pair's
    rules: acceptance rule -> options, for drafts with a q at a temperature above 0
    """

    version: str
    command: tuple[str, ...]
    method: str
    ways: Ways
    rules: Mapping[str, Mapping[str, Any]]


TOKENS = "num_speculative_tokens"
SUFFIX = {
    "n_max": TOKENS,
    "depth": "suffix_decoding_max_tree_depth",
    "max_spec_factor": "suffix_decoding_max_spec_factor",
    "min_token_prob": "suffix_decoding_min_token_prob",
    "cached": "suffix_decoding_max_cached_requests",
}
DRAFT = {"draft": "model", "draft_revision": "revision", "n_max": TOKENS, "intersection": "use_heterogeneous_vocab"}
VLLM: Ways = {
    "draft-model": ("draft_model", DRAFT),
    "prompt-lookup": ("ngram", {"n_max": TOKENS, "ngram_max": "prompt_lookup_max", "ngram_min": "prompt_lookup_min"}),
    "suffix": ("suffix", SUFFIX),
    "eagle3": ("eagle3", {"head": "model", "n_max": TOKENS}),
    "dflash": ("dflash", {"head": "model", "n_max": TOKENS}),
    "mtp": ("mtp", {"n_max": TOKENS}),
}

PATH, REVISION = "--speculative-draft-model-path", "--speculative-draft-model-revision"
VERIFIED = {"verified": "--speculative-num-draft-tokens"}
STEPS = {"n_max": "--speculative-num-steps", "top_k": "--speculative-eagle-topk", **VERIFIED}
SGLANG: Ways = {
    "draft-model": ("STANDALONE", {"draft": PATH, "draft_revision": REVISION, **STEPS}),
    "prompt-lookup": ("NGRAM", {**VERIFIED, "top_k": "--speculative-ngram-max-bfs-breadth"}),
    "eagle3": ("EAGLE3", {"head": PATH, **STEPS}),
    "dflash": ("DFLASH", {"head": PATH, **VERIFIED}),
    "mtp": ("EAGLE", STEPS),
}

N_MAX = {"n_max": "--spec-draft-n-max"}
MAPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
LLAMA: Ways = {
    "draft-model": (
        "draft-simple",
        {"draft": "-md", **N_MAX, "n_min": "--spec-draft-n-min", "p_min": "--spec-draft-p-min"},
    ),
    "eagle3": ("draft-eagle3", {"head": "-md", **N_MAX}),
    "dflash": ("draft-dflash", {"head": "-md", **N_MAX}),
    "mtp": ("draft-mtp", N_MAX),
    **{
        name: (name, {o: f"--spec-{name}-{o.replace('_', '-')}" for o in ("size_n", "size_m", "min_hits")})
        for name in MAPS
    },
    "ngram-mod": ("ngram-mod", {o: f"--spec-ngram-mod-{o.replace('_', '-')}" for o in ("n_match", "n_min", "n_max")}),
    "ngram-cache": ("ngram-cache", {"static": "--lookup-cache-static", "dynamic": "--lookup-cache-dynamic"}),
}

SAMPLED = {"draft_sample_method": "probabilistic"}
SPEC = "--spec-draft-sampling"
ENGINES = {
    "vllm": Engine(
        "vLLM at commit 002e77c1",
        ("vllm", "serve"),
        "method",
        VLLM,
        {"leviathan": SAMPLED, "block": {**SAMPLED, "rejection_sample_method": "block"}},
    ),
    "sglang": Engine(
        "SGLang at commit 004c82e0",
        ("python", "-m", "sglang.launch_server", "--model-path"),
        "--speculative-algorithm",
        SGLANG,
        {"leviathan": {"--speculative-use-rejection-sampling": True}},
    ),
    "llama.cpp": Engine(
        "llama.cpp at commit 00dc8057",
        ("llama-server", "-m"),
        "--spec-type",
        LLAMA,
        {"leviathan": {SPEC: "probabilistic"}, "match": {SPEC: "greedy"}},
    ),
}
