"""Compares two tokenizers: a draft's ids must mean the same text to the target.

Two models of one family rarely differ in text, and often in special tokens: one is renamed, two are exchanged, hundreds
are added at the end. Such a pair shares all other ids. The draft never proposes the few that differ: they are taken out
of its distribution before anything is sampled, so q is still what its tokens were sampled from.

The tolerance for ordinary text is llama.cpp's: the same text for every id from 5 on, and sizes within 128. Its other
conditions, the same kind of tokenizer and the same handling of BOS and EOS, concern text that a draft never tokenises:
they are named in a refusal, and otherwise in a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_SIZE_DIFFERENCE = 128  # llama.cpp's limit on how far two vocabularies may differ in size
FIRST_COMPARED_ID = 5  # llama.cpp compares token texts from this id on; the ids before are special
SHOWN = 3  # ids that a message names


@dataclass(frozen=True)
class Vocabularies:
    """A comparison of two tokenizers.

    refusal: why they are different vocabularies; None: they are one
    differing: ids whose texts differ, in order
    examples: some of them in words
    """

    refusal: str | None
    differing: tuple[int, ...] = ()
    examples: str = ""

    @property
    def kind(self) -> str:
        """One of identical, compatible, different."""
        if self.refusal is not None:
            return "different"
        return "compatible" if self.differing else "identical"

    @staticmethod
    def compare(target: Any, draft: Any) -> Vocabularies:
        """Compare two tokenizers, target's first."""
        if target.get_vocab() == draft.get_vocab():
            return Vocabularies(None)
        mine, theirs = _texts(target), _texts(draft)
        differing = [i for i in sorted({*mine, *theirs}) if mine.get(i) != theirs.get(i)]
        special = _special(target) | _special(draft)
        both = [i for i in differing if i in mine and i in theirs and i not in special and i >= FIRST_COMPARED_ID]
        alone = [sum(i not in special for i in set(a) - set(b)) for a, b in ((mine, theirs), (theirs, mine))]
        faults = []
        if both:
            compared = f"{len(both)} of {len(set(mine) & set(theirs))} common ids differ: "
            faults.append(compared + _examples(both, mine, theirs))
        if max(alone) > MAX_SIZE_DIFFERENCE:
            faults.append(f"vocabulary sizes {len(mine)} and {len(theirs)} differ by more than {MAX_SIZE_DIFFERENCE}")
        if len(differing) == len({*mine, *theirs}):
            faults.append("no id has the same text in both")
        examples = _examples(differing, mine, theirs)
        refusal = "; ".join([*handling(target, draft), *faults]) if faults else None
        return Vocabularies(refusal, tuple(differing), examples)


def compare_vocabularies(target: Any, draft: Any) -> str:
    """Return "identical", "compatible", or what differs."""
    found = Vocabularies.compare(target, draft)
    return found.refusal or found.kind


def handling(target: Any, draft: Any) -> list[str]:
    """List how two tokenizers treat text differently, apart from their ids."""
    found = []
    if (mine := _kind(target)) != (theirs := _kind(draft)):
        found.append(f"tokenizer kinds {mine} and {theirs}")
    for name in ("bos", "eos"):
        if (mine := _adds(target, name)) != (theirs := _adds(draft, name)):
            found.append(f"{name.upper()} handling {mine} and {theirs}")
    return found


def _texts(tokenizer: Any) -> dict[int, str]:
    """Map every id to its text in the vocabulary."""
    return {int(i): str(text) for text, i in sorted(tokenizer.get_vocab().items(), reverse=True)}


def _special(tokenizer: Any) -> set[int]:
    """Return ids that are no ordinary text: special tokens, and those added to the vocabulary."""
    return {*tokenizer.all_special_ids, *(getattr(tokenizer, "added_tokens_decoder", None) or ())}


def _examples(ids: list[int], mine: dict[int, str], theirs: dict[int, str]) -> str:
    """Show the first few ids with both texts."""
    parts = [f"token {i} is {_shown(mine.get(i))} and {_shown(theirs.get(i))}" for i in ids[:SHOWN]]
    return ", ".join(parts) + (", ..." if len(ids) > SHOWN else "")


def _shown(text: str | None) -> str:
    return "absent" if text is None else repr(text)


def _kind(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return type(backend.model).__name__ if backend is not None else type(tokenizer).__name__


def _adds(tokenizer: Any, name: str) -> str:
    """Say if a BOS / EOS is added to text, and which id."""
    token = getattr(tokenizer, f"{name}_token_id")
    ids = tokenizer("a")["input_ids"]
    present = bool(ids) and token is not None and token in (ids[:1] if name == "bos" else ids[-1:])
    return f"adds id {token}" if present else "adds none"
