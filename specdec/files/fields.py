"""What settings are checked with before torch is loaded, which takes seconds."""

from __future__ import annotations

import sys
from typing import Any

# GenerationConfig fields that transformers turns into processors that read the text, and into warpers that do not.
TEXT_FIELDS = (
    "sequence_bias", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
WARPER_FIELDS = (
    "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "renormalize_logits",
)  # fmt: skip
OWN_FIELDS = ("presence_penalty", "frequency_penalty")  # not in GenerationConfig
STRATEGY_NAMES = (
    "draft-model", "prompt-lookup", "recycling", "suffix", "rest", "lookahead", "ngram-simple", "ngram-map-k",
    "ngram-map-k4v", "ngram-mod", "ngram-cache", "eagle3", "dflash", "mtp", "early-exit",
)  # fmt: skip
WIDEST = 512  # most tokens that a pass feeds to a row


def is_tensor(value: Any) -> bool:
    """Whether this is one of torch's tensors: without torch there is none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
