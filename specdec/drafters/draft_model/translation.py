"""draft-model with another vocabulary: the draft writes text, and the text is tokenised for the target.

Each round the row's text goes to the draft's tokenizer (`replacements`: strings of the target's text -> what the draft
should see instead, and back again in what it wrote), the draft continues it by argmax, and its continuation is
tokenised together with the text before it. The proposal has no q, so it is lossless.

Cost: two host reads per round (the text is made on the host) and tokenising the whole row; the draft's K/V is reused up
to the first id that changed. Meant for pairs without a common vocabulary, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.drafters.base import Draft, DraftContext, DraftRequest, Tokens, as_array
from specdec.drafters.draft_model.core import CoreDrafter, DraftCore
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

    def begin(self, row: int, prompt: Tokens) -> None:
        self._core.begin(row, [])

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        texts = [self._text(r) for r in requests]
        inner = [self._inner(r, text) for r, text in zip(requests, texts, strict=True)]
        limits = [self._core.room(r, self.settings.n_max) if r.last >= 0 else 0 for r in inner]
        work = [(r, n) for r, n in zip(inner, limits, strict=True) if n > 0]
        if not work:
            return [Draft() for _ in requests]
        written = self._continue([r for r, _ in work], max(n for _, n in work))
        proposed = [
            self._back(text, outer, written[outer.row][:n]) if outer.row in written else []
            for text, outer, n in zip(texts, requests, limits, strict=True)
        ]
        return [Draft(tokens, drafter=self.name) for tokens in proposed]

    def _text(self, request: DraftRequest) -> str:
        ids = [*map(int, request.tokens), int(request.last)]
        tokenizer: Any = self.context.tokenizer
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _inner(self, request: DraftRequest, text: str) -> DraftRequest:
        """Return the same row in the draft's ids; its cache is trimmed to what still agrees."""
        for old, new in self.settings.replacements.items():
            text = text.replace(old, new)
        tokenizer: Any = self.context.draft_tokenizer
        ids = as_array(tokenizer(text)["input_ids"])
        row, core = request.row, self._core
        if len(ids) == 0:
            return replace(request, tokens=[], last=-1)
        known = min(core.length[row], core.written[row])
        core.length[row] = min(common_prefix(core.text[row, :known], ids), len(ids) - 1)
        return replace(request, tokens=ids[:-1], last=int(ids[-1]), n_max=0, sampling=None, noise=None)

    def _continue(self, requests: Sequence[DraftRequest], k: int) -> dict[int, list[int]]:
        """Return k argmax tokens of the draft for each row, on the host."""
        logits = self._core.catch_up(requests)
        tokens = []
        for i in range(k):
            tokens.append(logits.argmax(dim=-1))
            if i + 1 < k:
                logits = self._core.step(requests, tokens[-1], i)
        assert self.context.reader is not None
        columns = self.context.reader.read(*tokens)
        return {r.row: [column[r.row] for column in columns] for r in requests}

    def _back(self, text: str, request: DraftRequest, written: Sequence[int]) -> list[int]:
        """Return the draft's continuation in the target's ids; empty if the joint tokenisation changes earlier ids."""
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
