"""draft-model with another vocabulary: the draft writes text, and the text is tokenised for the target.

Each round the row's text goes to the draft's tokenizer (`replacements`: strings of the target's text -> what the draft
should see instead, and back again in what it wrote), the draft continues it by argmax, and its continuation is
tokenised together with the text before it. The proposal has no q, so it is lossless.

Cost: two host reads per round (the text is made on the host) and tokenising the whole row; the draft's K/V is reused up
to the first id that changed. Meant for pairs without a common vocabulary, not for speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.drafters.base import Draft, DraftContext, DraftRequest, Tokens, as_array, empty_like
from specdec.drafters.draft_model.core import CoreDrafter, DraftCore
from specdec.drafters.draft_model.steps import Stops
from specdec.errors import SpecdecError
from specdec.models.kv_cache import common_prefix
from specdec.models.pair_report import draft_capacity


@dataclass
class TranslatingDrafter(CoreDrafter):
    """Built by `DraftModel(translate=True)`, which is its `settings`."""

    settings: Any
    context: DraftContext
    name: str = field(init=False, default="draft-model")
    uses_draft_model = True

    def __post_init__(self) -> None:
        context = self.context
        if context.tokenizer is None or context.draft_tokenizer is None or context.draft_runner is None:
            wanted = f"translate={self.settings.translate!r}"
            raise SpecdecError(f"draft-model with {wanted} needs a draft model and both tokenizers")
        self._core = DraftCore(context.draft_runner, context.batch, draft_capacity(context.capacity))
        self._core.excluded = None  # no id of the draft's comes into the text
        self._texts: dict[int, str] = {}  # row -> the target's text

    def begin(self, row: int, prompt: Tokens) -> None:
        self._core.begin(row, [])

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        inner = [self._inner(r) for r in requests]
        limits = {r.row: self._core.room(r, self.settings.n_max) if r.last >= 0 else 0 for r in inner}
        work = [r for r in inner if limits[r.row] > 0]
        return self._propose(requests, work, limits) if work else empty_like(requests)

    def _inner(self, request: DraftRequest) -> DraftRequest:
        """Return the same row in the draft's ids, last < 0: it sees no text; its cache is trimmed to what agrees."""
        target: Any = self.context.tokenizer
        tokenizer: Any = self.context.draft_tokenizer
        ids = [*map(int, request.tokens), int(request.last)]
        text = str(target.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        self._texts[request.row] = text
        for old, new in self.settings.replacements.items():
            text = text.replace(old, new)
        own = as_array(tokenizer(text)["input_ids"])
        row, core = request.row, self._core
        if len(own) == 0:
            return replace(request, tokens=[], last=-1)
        known = min(core.length[row], core.written[row])
        core.length[row] = min(common_prefix(core.text[row, :known], own), len(own) - 1)
        return replace(request, tokens=own[:-1], last=int(own[-1]), n_max=0, sampling=None, noise=None)

    def _propose(
        self, requests: Sequence[DraftRequest], work: Sequence[DraftRequest], limits: Mapping[int, int]
    ) -> list[Draft]:
        """Draft for the rows of `work`, which are in the draft's ids; limits: row -> most tokens of the draft's."""
        k = self._core.recorded_steps(max(limits.values()), self.settings.n_max)
        proposal = self._core.propose(work, k, Stops(0.0, 0, None), self._core.runner.vocab_size)
        assert self.context.reader is not None
        [written] = self.context.reader.read(proposal.tokens)
        return [Draft(self._back(r, written[r.row][: limits[r.row]]), drafter=self.name) for r in requests]

    def _back(self, request: DraftRequest, written: Sequence[int]) -> list[int]:
        """Return the draft's continuation in the target's ids; empty if the joint tokenisation changes earlier ids."""
        text = self._texts[request.row]
        tokenizer: Any = self.context.draft_tokenizer
        target: Any = self.context.tokenizer
        continuation = tokenizer.decode(list(written), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for old, new in self.settings.replacements.items():
            continuation = continuation.replace(new, old) if new else continuation
        before = target(text, add_special_tokens=False)["input_ids"]
        joint = target(text + continuation.rstrip("�"), add_special_tokens=False)["input_ids"]
        # The newest token may have been emitted as another split of the same text; then nothing agrees.
        if joint[: len(before)] != before or not before or before[-1] != int(request.last):
            return []
        limit = request.n_max if request.n_max > 0 else len(joint)
        return [int(t) for t in joint[len(before) : len(before) + limit]][: self.settings.n_max]
