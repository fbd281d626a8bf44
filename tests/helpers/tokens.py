"""Small tokenizers made in memory, with no download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["the quick brown fox jumps over the lazy dog", "STOP here and there", "a b c d e f g", "naïve café über"]


def byte_level(vocab: int = 320, special: Sequence[str] = ("<pad>", "<s>", "</s>"), bos: bool = False) -> Any:
    """A byte-level BPE tokenizer: every id is some bytes, so characters are split over tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(CORPUS, trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def word_level(words: Sequence[str], **special: str) -> Any:
    """A tokenizer of whole words, ids in the order given."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0], **special)
