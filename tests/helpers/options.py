"""Every option of every strategy and every kind of call, and what a call comes to: for tests that compare modes of
running passes, with recorders on a CPU (test_options.py) and on a GPU (test_gpu.py)."""

from __future__ import annotations

from typing import Any

from specdec import DraftModel, PromptLookup, SpeculativeDecoder

# name -> a chain of strategies
STRATEGIES: dict[str, list[Any]] = {
    "plain": [],
    "n_max=1": ["draft-model:n_max=1"],
    "n_max=3": ["draft-model:n_max=3"],
    "n_max=5": ["draft-model:n_max=5"],
    "n_max=9": ["draft-model:n_max=9"],
    "p_min": ["draft-model:n_max=5:p_min=0.3"],
    "p_min, n_min": ["draft-model:n_max=5:p_min=0.4:n_min=2"],
    "top_n": ["draft-model:n_max=4:top_n=3:p_min=0.5"],
    "llama-classic": ["draft-model:preset=llama-classic"],
    "llama-2026": ["draft-model:preset=llama-2026"],
    "branches=4": [DraftModel(n_max=5, branches=4)],
    "branches=2, p_split": [DraftModel(n_max=3, branches=2, p_split=0.02)],
    "branches=3, p_min": [DraftModel(n_max=4, branches=3, p_min=0.2, p_split=0.05)],
    "branches=6, top_n": [DraftModel(n_max=3, branches=6, p_split=0.01, top_n=8)],
    "branches=3, n_min": [DraftModel(n_max=4, branches=3, p_min=0.4, n_min=2)],
    "tree=2x2x2": ["draft-model:tree=2x2x2"],
    "tree=3x1x2": ["draft-model:tree=3x1x2"],
    "tree=5": [DraftModel(tree=[5])],
    "tree=20": [DraftModel(tree=[20])],
    "tree=1x1x1": ["draft-model:tree=1x1x1"],
    "tree, uneven": [DraftModel(tree=[3, [2, 1, 0], 1])],
    "ngram-simple": ["ngram-simple"],
    "ngram-map-k": ["ngram-map-k"],
    "ngram-map-k4v": ["ngram-map-k4v"],
    "ngram-mod": ["ngram-mod:n_match=3"],
    "ngram-cache": ["ngram-cache"],
    "suffix": ["suffix"],
    "prompt-lookup": ["prompt-lookup:n_max=12"],
    "lookup, then model": [PromptLookup(n_max=3), "draft-model:n_max=4"],
    "lookup, then p_min": ["prompt-lookup", "draft-model:n_max=5:p_min=0.3"],
    "p_min, then lookup": ["draft-model:n_max=3:p_min=0.5", "prompt-lookup"],
    "lookup, then tree": [PromptLookup(n_max=2), "draft-model:tree=2x2"],
    "cache, then branches": ["ngram-cache", DraftModel(n_max=3, branches=3, p_split=0.05)],
    "translate": ["draft-model:n_max=4:translate=true"],
    "intersection": ["draft-model:n_max=4:translate=intersection"],
    "tree of 40": [DraftModel(tree=[4, 3, 2])],
    "recycling": ["recycling:nodes=30"],
    "lookahead": ["lookahead:window=4:ngram=3:guesses=4"],
    "early-exit": ["early-exit:layers=1:n_max=3"],
    "lookup, then early-exit": ["prompt-lookup", "early-exit:skip=0:n_max=2:p_min=0.1"],
    "lookup, then translate": ["prompt-lookup", "draft-model:n_max=4:translate=true"],
}

# name -> options of `generate`
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "match": {"temperature": 0.8, "acceptance": "match"},
    "coupled": {"temperature": 0.8, "acceptance": "coupled"},
    "warpers": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "narrow": {"temperature": 0.8, "top_k": 2},
    "one-hot": {"temperature": 1e-4},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.1, "no_repeat_ngram_size": 4},
    "sampled, penalty": {"temperature": 0.8, "repetition_penalty": 1.2},
    "logprobs": {"temperature": 0.8, "acceptance": "match", "output_logprobs": True},
    "three slots": {"batch_size": 3, "temperature": 0.8},
    "one slot": {"batch_size": 1},
    "automatic": {"draft_length": "auto"},
}


class Outcome:
    """What a call comes to that no way of running its passes may change."""

    def __init__(self, decoder: SpeculativeDecoder, prompts: list[Any], strategy: str, call: str, **options: Any):
        # Lengths are given: automatic length, but on a CPU, chooses others where passes cost something else.
        options = {"seed": 3, "draft_length": "given", **options, **CALLS[call]}
        out = decoder.generate(prompts, strategies=STRATEGIES[strategy], **options)
        self.token_ids, self.finish_reasons, self.logprobs = out.token_ids, out.finish_reasons, out.logprobs
        self.compile = out.provenance["compile"]
        counts = ("draft_tokens", "accepted_tokens", "verify_passes", "tokens_per_round")
        self.counts = {name: getattr(out.stats, name) for name in counts}

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        names = ("token_ids", "finish_reasons", "counts")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __repr__(self) -> str:
        return f"{self.finish_reasons} {self.counts} {self.token_ids}"
