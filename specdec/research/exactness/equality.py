"""Why two runs of one prompt differ: `why_not_equal` finds the first token that does, and says tie or fault.

Passes of different shape sum in different orders, so their logits differ in the last bits. Where two tokens are closer
than that, the runs may choose differently and both are right: a *tie*. Where they are not, one of the runs emitted a
token that the target did not choose: a *fault*.

The text up to the divergence is fed again, in the pass shape of each run, cache and all. The noise is measured there:
the largest difference of a score between any two of these passes and a one-token and an eight-token pass, over the
best tokens, and at least one unit of rounding of the model's dtype. Each of two scores can be off by that much, so the
runs tie when the worse of their tokens is within twice the noise of the best one. In sampled runs the score is what
sampling takes the argmax of: log p plus the Gumbel noise of the row's key, so that the same question can be asked.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor

from specdec.config import check_whole
from specdec.decoder import Call, SpeculativeDecoder
from specdec.decoding.acceptance import find_rule
from specdec.decoding.prompts import encode_prompts
from specdec.device.transfer import to_device
from specdec.errors import SpecdecError
from specdec.models.runner import EXACT_WIDTH, Runner, Shapes
from specdec.models.view import ModelView
from specdec.sampling.sampling import History, Purpose, exponential, row_key, streams

CONTESTED = 64  # best tokens whose scores the noise is measured on
REFERENCE_SHARE = 0.5  # of the free GPU memory that a float32 copy may take
REFERENCE_LIMIT = 4_000_000_000  # parameters of a float32 copy on a CPU


@dataclass(frozen=True)
class PassShape:
    """How a run feeds its text.

    tokens: ids of a row in a pass; 1 = plain decoding, a verify pass has several.
    batch: rows of a pass.
    exact: whether the call ran with fixed shapes.
    capacity: K/V slots of its cache; None = as many as needed.
    """

    tokens: int = 1
    batch: int = 1
    exact: bool = False
    capacity: int | None = None

    def __str__(self) -> str:
        kind = "exact" if self.exact else f"width {self.tokens}"
        return f"{kind}, batch {self.batch}"


@dataclass(frozen=True)
class View:
    """What one pass makes of the position.

    tokens, scores: the two best, best first.
    of_a, of_b: the scores of the runs' tokens.
    gap: how far the worse of these two is below the best.
    """

    name: str
    tokens: tuple[int, int]
    scores: tuple[float, float]
    of_a: float
    of_b: float

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> View:
        """The view that `Report.to_dict` wrote."""
        tokens, scores = tuple(data["tokens"]), tuple(data["scores"])
        return View(data["name"], tokens, scores, data["of_a"], data["of_b"])

    @property
    def margin(self) -> float:
        return self.scores[0] - self.scores[1]

    @property
    def gap(self) -> float:
        return self.scores[0] - min(self.of_a, self.of_b)


@dataclass(frozen=True)
class Report:
    """The answer of `why_not_equal`.

    verdict: equal | tie | fault | prefix (one run is the beginning of the other).
    position: index of the first divergence in the generated ids.
    tokens, texts: the two runs' ids there, and the same decoded; None for a run that has ended.
    views: run a's pass, run b's, and the float32 reference if there is one; reference_note: why not.
    noise: largest difference of a contested score between passes.
    resolution: one unit of rounding at the best logit.
    gap: the smaller of the two runs' gaps.
    promised: both runs had fixed shapes, so that not even a tie may happen.
    """

    verdict: str
    names: tuple[str, str]
    position: int | None = None
    tokens: tuple[int | None, int | None] = (None, None)
    texts: tuple[str | None, str | None] = (None, None)
    context: str | None = None
    views: tuple[View, ...] = ()
    noise: float = 0.0
    resolution: float = 0.0
    gap: float | None = None
    promised: bool = False
    reference_note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        views = [{**asdict(v), "margin": v.margin, "gap": v.gap} for v in self.views]
        return {**asdict(self), "views": views}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        """The report that `to_dict` wrote, also after JSON; other keys are ignored."""
        known: dict[str, Any] = {k: v for k, v in data.items() if k in Report.__dataclass_fields__}
        known = {k: tuple(v) if isinstance(v, list) else v for k, v in known.items()}
        return Report(**{**known, "views": tuple(View.from_dict(view) for view in known["views"])})

    def renderable(self) -> RenderableType:
        """The report on one screen."""
        if self.verdict == "equal":
            return f"{self.names[0]} and {self.names[1]} are equal"
        sides = zip(self.names, self.tokens, self.texts, strict=True)
        has = ", ".join(f"{name} has {t}{'' if text is None else f' {text!r}'}" for name, t, text in sides)
        lines = [f"first divergence at generated token {self.position}: {has}"]
        if self.context is not None:
            lines.append(f"after ...{self.context!r}")
        made = Table("pass", "best", "second", "margin", *(f"{n}'s token" for n in self.names), "gap")
        for view in self.views:
            pairs = zip(view.tokens, view.scores, strict=True)
            best = [f"{token}: {score:.6g}" for token, score in pairs]
            figures = (f"{x:.6g}" for x in (view.margin, view.of_a, view.of_b, view.gap))
            made.add_row(view.name, *best, *figures)
        parts: list[RenderableType] = ["\n".join(lines), *([made] if self.views else []), self._conclusion()]
        return Group(*parts)

    def _conclusion(self) -> str:
        if self.verdict == "prefix":
            return "prefix: one run is the beginning of the other; no token differs"
        figures = f"gap {self.gap:.3g}, noise {self.noise:.3g}, one unit of rounding {self.resolution:.3g}"
        if self.verdict == "fault":
            return f"FAULT: {figures}: the target prefers another token by more than twice the noise"
        promise = "; but exact mode promises identical passes: please report it" if self.promised else ""
        return f"tie: {figures}: both tokens are best within rounding{promise}"


def why_not_equal(
    decoder: SpeculativeDecoder,
    prompt: Any,
    a: Sequence[int],
    b: Sequence[int],
    *,
    names: tuple[str, str] = ("a", "b"),
    shape_a: PassShape | None = None,
    shape_b: PassShape | None = None,
    reference: Any = "auto",
    row: int = 0,
    **options: Any,
) -> Report:
    """Compare two generated id sequences of one prompt, and explain their first divergence.

    a, b: generated ids, as in `Generation.token_ids`; names: of the runs, for the report
    shape_a, shape_b: the runs' pass shapes; None = one token a pass for a, a verify pass of eight for b
    reference: a float32 copy of the target; "auto" = make one where memory allows, None = do without
    row: the prompt's number in its call, for sampled runs with one seed
    options: the generation options of the runs, if they were not greedy
    Raises SpecdecError for sampling under rules whose text is not meant to equal plain decoding's, such as `leviathan`.
    """
    target = decoder.target
    a, b = _checked_ids(a, "a", target.vocab_size), _checked_ids(b, "b", target.vocab_size)
    check_whole("why_not_equal: row", row, 0)
    position = first_difference(a, b)
    if position is None:
        return Report("equal", names)
    encoded = encode_prompts(prompt, decoder.tokenizer, target.vocab_size, target.context)
    if len(encoded) != 1:
        raise SpecdecError(f"why_not_equal takes one prompt, got {len(encoded)}")
    known = [*encoded[0], *a[:position]]
    tokens = (a[position] if position < len(a) else None, b[position] if position < len(b) else None)
    place = {"names": names, "position": position, "tokens": tokens, **_texts(decoder.tokenizer, known, tokens)}
    if tokens[0] is None or tokens[1] is None:
        return Report("prefix", **place)
    runs = (shape_a or PassShape(), shape_b or PassShape(tokens=EXACT_WIDTH))
    question = _Question(decoder, known, len(encoded[0]), (tokens[0], tokens[1]), row, options)
    scores = [question.scores(shape) for shape in runs]
    views = [question.view(f"{n}: {s}", x) for n, s, x in zip(names, runs, scores, strict=True)]
    noise = question.noise([*scores, *(question.scores(PassShape(n, runs[0].batch)) for n in (1, EXACT_WIDTH))])
    gap, resolution = min(view.gap for view in views), question.resolution
    model, note = (reference, None) if reference is not None else (None, "not asked for")
    if isinstance(reference, str):
        model, note = float32_reference(target)
    if model is not None:
        views.append(question.view("float32 reference", question.reference_scores(model)))
    place |= {"views": tuple(views), "noise": noise, "resolution": resolution, "gap": gap, "reference_note": note}
    verdict = "tie" if gap <= 2 * max(noise, resolution) else "fault"
    return Report(verdict, promised=runs[0].exact and runs[1].exact, **place)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place at which two rows differ, the end of the shorter where it begins the other; None: nowhere."""
    if len(a) == len(b) and list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _checked_ids(ids: Any, name: str, vocab_size: int) -> list[int]:
    if not isinstance(ids, Sequence | np.ndarray) or not all(isinstance(t, Integral) for t in ids):
        raise SpecdecError(f"why_not_equal: {name} must be one row of generated ids, got {type(ids).__name__}")
    found = [int(t) for t in ids]
    if found and not 0 <= min(found) <= max(found) < vocab_size:
        raise SpecdecError(f"why_not_equal: {name} holds an id outside the target's vocabulary of {vocab_size}")
    return found


def replay(runner: Runner, ids: Sequence[int], prompt_length: int, shape: PassShape) -> Tensor:
    """Logits [V] float32 after `ids`, fed as a run of this shape feeds them: a prefill of the prompt without its last
    token, then passes of `shape.tokens`. The first of these passes is the short one, so that the last is full."""
    capacity = runner.pool.room(shape.capacity if shape.capacity is not None else len(ids) + shape.tokens)
    shapes = Shapes.choose(runner.device, shape.exact, capacity)
    most = min(shape.tokens, shapes.verify_width)
    width = shapes.width(most)
    idle = [0] * (shape.batch - 1)
    cache = runner.pool.make(shape.batch, capacity)
    runner.follow(cache, 0, prompt_length - 1)
    runner.prefill(cache, shapes, {0: list(ids[: prompt_length - 1])}, {0: 0})
    start, end = prompt_length - 1, prompt_length - 1 + ((len(ids) - prompt_length) % most + 1)
    while True:
        end = min(end, start + 1 + runner.before_switch(start))
        if runner.follow(cache, 0, start):
            runner.prefill(cache, shapes, {0: list(ids[:start])}, {0: 0})
        chunk = list(ids[start:end])
        fed = [chunk + [0] * (width - len(chunk)), *([0] * width for _ in idle)]
        out = runner.step(cache, shapes, to_device(fed, runner.device), [start, *idle], [len(chunk), *idle])
        if end == len(ids):
            return out.logits[0, len(chunk) - 1, : runner.vocab_size].float()
        start, end = end, min(end + most, len(ids))


def float32_reference(target: Runner) -> tuple[Any, str | None]:
    """The target in float32, for `why_not_equal(reference=...)`: itself if it already is, else a copy, if memory allows
    one. Returns a model and None, or None and the reason."""
    model = target.model
    if getattr(model.config, "quantization_config", None) is not None:
        return None, "a quantised model has no float32 copy"
    if target.dtype == torch.float32:
        return model, None
    size = sum(p.numel() for p in model.parameters())
    if target.device.type == "cuda":
        if 4 * size > REFERENCE_SHARE * torch.cuda.mem_get_info(target.device)[0]:
            return None, "a float32 copy would not fit into the GPU's memory"
    elif size > REFERENCE_LIMIT:
        return None, "a float32 copy would be too large"
    return copy.deepcopy(model).float(), None


def content_dependence(runner: Runner, contents: int = 16, batch: int = 2) -> dict[str, Any]:
    """Whether a token's logits depend on what else is in its pass, shapes being equal: what exact mode rests on.

    One token follows one text; the rest of the pass, in its row and in the others, is random. Returns how many passes
    were compared with the first, how many gave other logits, and the largest difference.
    """
    generator = torch.Generator().manual_seed(0)

    def random_ids(n: int) -> list[int]:
        return torch.randint(0, runner.vocab_size, (n,), generator=generator).tolist()

    length = 16
    shapes = Shapes.choose(runner.device, True, length + EXACT_WIDTH)
    cache = runner.pool.make(batch, length + EXACT_WIDTH)
    for row in range(batch):
        runner.prefill(cache, shapes, {row: random_ids(length)}, {row: 0})
    newest, seen = random_ids(1), []
    for _ in range(contents):
        fed = [newest + random_ids(EXACT_WIDTH - 1), *(random_ids(EXACT_WIDTH) for _ in range(batch - 1))]
        cache.begin_draft(range(batch))
        out = runner.step(cache, shapes, to_device(fed, runner.device), [length] * batch, [EXACT_WIDTH] * batch)
        cache.rewind(dict.fromkeys(range(batch), length))
        seen.append(out.logits[0, 0].float())
    off = torch.stack([(s - seen[0]).abs().max() for s in seen[1:]])
    return {"compared": len(off), "differing": int((off != 0).sum()), "largest": float(off.max())}


@dataclass
class _Question:
    """Which of two tokens follows `known`? Scores of passes are computed once each."""

    decoder: SpeculativeDecoder
    known: list[int]
    prompt_length: int
    tokens: tuple[int, int]
    row: int
    options: dict[str, Any]
    resolution: float = field(init=False, default=0.0)
    _scores: dict[PassShape, Tensor] = field(init=False, default_factory=dict)

    def scores(self, shape: PassShape) -> Tensor:
        """What the choice is the argmax of, [V], by a replay in this shape."""
        if shape not in self._scores:
            runner = self.decoder.target
            logits = replay(runner, self.known, self.prompt_length, shape)
            unit = torch.finfo(runner.dtype).eps * abs(float(logits.max()))
            self.resolution = max(self.resolution, unit / (self._call.sampling.temperature or 1.0))
            self._scores[shape] = self._choice(logits)
        return self._scores[shape]

    def reference_scores(self, model: Any) -> Tensor:
        """The same by one forward over everything, without a cache."""
        runner = self.decoder.target
        keep = {"logits_to_keep": 1} if runner.can_trim_logits else {}
        ids = to_device([self.known], runner.device)
        plain = ModelView(model, "eager")
        with torch.no_grad(), plain.attending():
            logits = plain.model(input_ids=ids, use_cache=False, **keep).logits
        return self._choice(logits[0, -1, : runner.vocab_size].float())

    def view(self, name: str, scores: Tensor) -> View:
        best = scores.topk(2)
        first, second = best.indices.tolist()
        high, low = best.values.tolist()
        a, b = (float(scores[t]) for t in self.tokens)
        return View(name, (first, second), (high, low), a, b)

    def noise(self, passes: Sequence[Tensor]) -> float:
        """Largest difference of a contested score between two passes."""
        contested = passes[0].topk(min(CONTESTED, len(passes[0]))).indices
        values = torch.stack([p[contested] for p in passes])
        values = values[:, values.isfinite().all(dim=0)]  # processors forbid tokens with -inf
        return float((values.amax(dim=0) - values.amin(dim=0)).max())

    @cached_property
    def _call(self) -> Call:
        options = {**self.options, "num_return_sequences": 1}
        rule = find_rule(options.get("acceptance", "match"))
        if options.get("temperature", 0) > 0 and not rule.lossy and not rule.same_text:
            raise SpecdecError(
                f"why_not_equal: {rule.name} keeps the distribution and not the sample, so its text may differ"
            )
        prompt = self.known[: self.prompt_length]
        return self.decoder._call([prompt], [], **options)

    def _choice(self, logits: Tensor) -> Tensor:
        sampling, settings = self._call.sampling, self._call.settings
        history = None
        if sampling.row_processors is not None:
            prompt = self.known[: self.prompt_length]
            processors = sampling.row_processors(self.row, prompt, settings.max_new_tokens)
            processors.commit(self.known[self.prompt_length :])
            ids = to_device(self.known, logits.device)
            history = History([ids[:-1]], ids[None, -1:], [processors], [1])
        scores = sampling.scores(logits[None, None], history)[0, 0]
        if sampling.greedy:
            return scores
        key = row_key(settings.seed[0] if isinstance(settings.seed, list) else settings.seed, self.row)
        place = streams(to_device(key, logits.device), to_device(len(self.known), logits.device), Purpose.SAMPLE)
        return torch.log_softmax(scores, dim=-1) - exponential(place, len(scores)).log()


def _texts(tokenizer: Any, known: Sequence[int], tokens: Sequence[int | None]) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    texts = tuple(None if t is None else tokenizer.decode([t]) for t in tokens)
    return {"texts": texts, "context": tokenizer.decode(list(known[-12:]))}
