"""draft-model with another vocabulary and a q: the draft keeps to the tokens that both vocabularies have.

Source: token-level intersection, TLI (Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies"). The draft's logits are taken at the tokens whose text the target's
vocabulary has as well, and softmaxed over these alone. So q is the distribution that a token is really sampled from,
over the target's ids, and drafts are lossless under every rule.

The draft reads the row in its own ids: a prompt is tokenised once, common tokens keep their counterpart, and runs of
others are tokenised as they come. Its cache is only ever extended. Not recorded on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from specdec.device.transfer import to_device
from specdec.drafters.base import Draft, DraftRequest, Tokens
from specdec.drafters.draft_model.steps import Stops
from specdec.drafters.draft_model.translation import TranslatingDrafter
from specdec.errors import SpecdecError

SPACES = ("Ġ", "▁")  # how kinds of tokenizers write a space that begins a token


class IntersectingDrafter(TranslatingDrafter):
    """Built by `DraftModel(translate="intersection")`, which is its `settings`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        context, runner = self.context, self._core.runner
        sizes = context.vocab_size, runner.vocab_size
        self.counterpart = counterparts(context.tokenizer, context.draft_tokenizer, *sizes)
        if not self.counterpart:
            raise SpecdecError("target and draft have no token in common: use translate=True, which goes through text")
        source = [self.counterpart.get(token, -1) for token in range(context.vocab_size)]
        self._core.source = to_device(source, runner.device)
        self.read: dict[int, tuple[int, list[int]]] = {}  # row -> target tokens read so far, the draft's ids of them

    def begin(self, row: int, prompt: Tokens) -> None:
        super().begin(row, prompt)
        self.read.pop(row, None)

    def _propose(
        self, requests: Sequence[DraftRequest], work: Sequence[DraftRequest], limits: Mapping[int, int]
    ) -> list[Draft]:
        stops = Stops(self.settings.p_min, self.settings.n_min, self.settings.top_n)
        proposal = self._core.propose(work, max(limits.values()), stops, self.context.vocab_size)
        return self.drafts(requests, limits, proposal)

    def _inner(self, request: DraftRequest) -> DraftRequest:
        """Return the row in the draft's ids, at the target's position; last < 0: the draft sees no text yet."""
        known, ids = self.read.get(request.row, (0, []))
        new = [*map(int, request.tokens[known:]), int(request.last)]
        ids += self._translated(new, whole=known == 0)
        self.read[request.row] = len(request.tokens) + 1, ids
        return replace(request, tokens=ids[:-1], last=ids[-1] if ids else -1)

    def _translated(self, tokens: Sequence[int], whole: bool) -> list[int]:
        """Return the draft's ids of new tokens; whole: they are a row's first ones, and one text."""
        ids: list[int] = []
        for is_common, run in groupby(tokens, lambda token: not whole and token in self.counterpart):
            part = list(run)
            ids += [self.counterpart[token] for token in part] if is_common else self._through_text(part, whole)
        return ids

    def _through_text(self, tokens: Sequence[int], whole: bool) -> list[int]:
        target: Any = self.context.tokenizer
        draft: Any = self.context.draft_tokenizer
        text = target.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [int(i) for i in draft(text.strip("�"), add_special_tokens=whole)["input_ids"]]


def counterparts(target: Any, draft: Any, size: int, draft_size: int) -> dict[int, int]:
    """Map the target's ids to the draft's ids of the same text, one to one: all below the models' sizes.

    Texts are compared as the vocabularies have them, with one sign for a space; the two EOS tokens are one.
    """
    theirs: dict[str, int] = {}
    for text, i in sorted(draft.get_vocab().items(), key=lambda item: item[1]):
        if i < draft_size:
            theirs.setdefault(_plain(text), i)
    found: dict[int, int] = {}
    for text, i in sorted(target.get_vocab().items(), key=lambda item: item[1]):
        match = theirs.pop(_plain(text), None) if i < size else None
        if match is not None:
            found[int(i)] = int(match)
    ends = target.eos_token_id, draft.eos_token_id
    if None not in ends and ends[0] not in found and ends[1] not in found.values() and ends[1] < draft_size:
        found[ends[0]] = ends[1]
    return found


def _plain(text: str) -> str:
    for sign in SPACES:
        text = text.replace(sign, " ")
    return text
