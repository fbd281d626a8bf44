"""What names of transformers' `generate` and `from_pretrained` are called here, or why they have no counterpart."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BEAMS = "beam search is not supported, since speculative decoding verifies one continuation a row"
_ENCODER = "specdec runs decoder-only models"
_PROMPTS = (
    "prompts are the first argument, as texts, chats or token ids of any lengths: "
    'tokenizer(texts)["input_ids"] without padding, in place of **tokenizer(texts)'
)
_MASK = f"rows are not padded and need no mask: {_PROMPTS}"
_DRAFT = "give the draft model when the decoder is built: draft_model=..., or draft=... to from_pretrained"
_SAME = "the result has everything"
HINTS = {
    # drafting
    "assistant_model": _DRAFT,
    "assistant_tokenizer": "write draft_tokenizer=... when the decoder is built",
    "num_assistant_tokens": (
        'write strategies=["draft-model:n_max=N:p_min=0.4"], where 0.4 is the confidence threshold that transformers '
        "has unless told otherwise; without n_max the length is automatic"
    ),
    "num_assistant_tokens_schedule": (
        'write draft_length="given" for constant, length_policy="heuristic" for heuristic; or draft_length="auto"'
    ),
    "assistant_confidence_threshold": 'write strategies=["draft-model:p_min=N"]',
    "assistant_early_exit": 'write strategies=["early-exit:layers=N"]',
    "prompt_lookup_num_tokens": 'write strategies=["prompt-lookup:n_max=N:ngram_max=2:match=earliest"]',
    "max_matching_ngram_size": 'write strategies=["prompt-lookup:ngram_max=N:match=earliest"]',
    "strategy": 'write strategies=["prompt-lookup"], a list in order of priority',
    # prompts
    "input_ids": _PROMPTS,
    "inputs": _PROMPTS,
    "attention_mask": _MASK,
    "token_type_ids": _MASK,
    "padding": _MASK,
    "padding_side": _MASK,
    # text
    "do_sample": "temperature=0 is greedy, temperature > 0 samples; transformers samples with temperature=1, top_k=50",
    "max_length": "write max_new_tokens=..., which counts without the prompt",
    "generation_config": "write its fields as options of their own, such as temperature=0.8",
    "streamer": "write for piece in decoder.stream(prompt)",
    "use_cache": "keys and values are always cached; keep_state=True keeps them between calls",
    "past_key_values": "keep_state=True reuses what an earlier call has computed",
    "return_dict_in_generate": f"{_SAME}: out.token_ids, out.texts, out.stats",
    "output_scores": f"{_SAME}; output_logprobs=True adds log-probabilities, decoder.rounds yields p and q",
    "output_logits": f"{_SAME}; output_logprobs=True adds log-probabilities, decoder.rounds yields p and q",
    # loading
    "torch_dtype": "write dtype=...",
    "load_in_4bit": "write quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True)",
    "load_in_8bit": "write quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True)",
    # what there is not
    "num_beams": _BEAMS,
    "num_beam_groups": _BEAMS,
    "guidance_scale": "classifier-free guidance is not supported",
    "watermarking_config": "watermarking is not supported",
    "penalty_alpha": "contrastive search is not supported",
    "encoder_repetition_penalty": f"it needs an encoder, and {_ENCODER}",
    "encoder_no_repeat_ngram_size": f"it needs an encoder, and {_ENCODER}",
}
# What columns and axes of tables, and options of strategies, have for the same: the first of these that is known there.
ALIASES = {
    "num_assistant_tokens": ("n_max", "k"),
    "num_speculative_tokens": ("n_max", "k"),
    "prompt_lookup_num_tokens": ("n_max", "k"),
    "max_matching_ngram_size": ("ngram_max",),
    "assistant_confidence_threshold": ("p_min",),
    "do_sample": ("temperature",),
    "assistant_model": ("draft",),
    "model": ("target",),
}
# Where the command line has another option than Python.
_TYPED = {
    "model": "write --target MODEL",
    "assistant_model": "write --draft MODEL",
    "num_speculative_tokens": "write --strategies draft-model:n_max=N; without n_max the length is automatic",
    "input_ids": "write --prompt TEXT or --prompt-file FILE",
    "inputs": "write --prompt TEXT or --prompt-file FILE",
    "max_length": "write --max-new-tokens N, which counts without the prompt",
    "stream": "texts are printed when they are finished; decoder.stream(prompt) in Python yields pieces",
}


def typed(name: str, words: Sequence[str] = ()) -> str | None:
    """What to type in place of an option of transformers' name, with or without dashes; None where it is no habit.
    words: the command line, whose number takes the place of N."""
    given, name = re.escape(name), name.lstrip("-").replace("-", "_")
    hint = _TYPED.get(name) or HINTS.get(name)
    if hint is None:
        return None
    hint = re.sub(r'strategies=\["([^"]+)"\]', r"--strategies \1", hint)
    hint = re.sub(r'\b(draft_length|length_policy|keep_state|output_logprobs)="?(\w+)"?', r"--option \1=\2", hint)
    hint = re.sub(
        r"\b(temperature|top_k|dtype)=([\w.]+)", lambda found: f"--{found[1]} {found[2]}".replace("_", "-"), hint
    )
    number = re.search(rf"(?<!\S){given}[ =]([\d.]+)(?!\S)", " ".join(map(str, words)))
    return re.sub("=N\\b", f"={number[1]}", hint) if number else hint
