"""The one thread that owns the decoder: it admits requests into free slots while others go on.

Texts whose sampling settings are equal share live calls (decoding/live.py), whose passes are batched; settings that
differ have calls of their own, and the calls take turns, a pass each. Seeds, lengths and stops are every text's own. A
call has as many slots as its texts need when it is opened, so that few texts do not pay for many slots: texts that come
later take slots that are free, or a further call is opened, up to `slots` in all. Texts are placed in the order in
which they came.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from specdec.cli.serving.metrics import Metrics, Timing
from specdec.cli.serving.protocol import MOST_TEXTS, REASONS, ApiError, Chat, Likely, Piece, Request, as_api_error
from specdec.decoder import SpeculativeDecoder
from specdec.decoding.live import LiveCall
from specdec.decoding.prompts import TextStream, encode_prompts
from specdec.decoding.row import Row
from specdec.errors import SpecdecError
from specdec.stats import RoundRecord

log = logging.getLogger("specdec.serve")
STOPPING = "the server is stopping"
NO_TEMPLATE = (
    "this model has no chat template: start the server with --chat-template FILE, or send a text to /v1/completions"
)
COMPLETION_TOKENS = 16  # OpenAI's default for completions; chats go on to the end of the context


@dataclass(frozen=True)
class Event:
    """News of a request, first that it is taken, then of its texts.

    count: texts of a request that is taken
    index: which of them this is about
    piece: what is new of it; without a stream all of it, at its end
    error: why there is no more news
    """

    count: int = 0
    index: int = 0
    piece: Piece | None = None
    error: ApiError | None = None


@dataclass(eq=False)
class Job:
    """One request. `post` hands its events on, from the worker's thread."""

    request: Request
    settings: dict[str, Any]
    seed: int
    post: Callable[[Event], None]
    most_tokens: int | None = None
    prompt_tokens: int = 0
    gone: bool = False  # nobody waits for the answer any more
    asked: float = field(default_factory=time.perf_counter)
    rounds: list[RoundRecord] = field(default_factory=list)

    @property
    def key(self) -> tuple[tuple[str, Any], ...]:
        """Equal for jobs that can share a call."""
        return tuple(sorted(self.settings.items()))


@dataclass(eq=False)
class TextInFlight:
    """One text of a request, on its way from the queue to its end."""

    job: Job
    index: int
    prompt: list[int]
    timing: Timing
    row: Row | None = None
    stream: TextStream | None = None
    counted: int = 0  # rounds that are in the metrics
    told: int = 0  # tokens whose log-probabilities were posted
    length: int = 0  # characters of these


@dataclass(eq=False)
class Batch:
    """A live call and the texts in it."""

    key: tuple[Any, ...]
    call: LiveCall
    texts: list[TextInFlight] = field(default_factory=list)
    passes: int = 0


class Worker(threading.Thread):
    """Decodes what is submitted until it is drained.

    defaults: generation options of requests that do not give their own
    slots: most texts at a time
    context: most tokens of a text and its prompt
    """

    def __init__(
        self, decoder: SpeculativeDecoder, metrics: Metrics, defaults: dict[str, Any], slots: int, context: int
    ):
        super().__init__(name="specdec-worker", daemon=True)
        self.decoder, self.metrics, self.slots, self.context = decoder, metrics, slots, context
        self.defaults = dict(defaults)
        self.seed, self.most_tokens = self.defaults.pop("seed", None), self.defaults.pop("max_new_tokens", None)
        self.inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.waiting: deque[TextInFlight] = deque()
        self.batches: list[Batch] = []
        self.deadline: float | None = None  # of what is in flight, once the server stops

    # -- for other threads -----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if requests are taken."""
        return self.is_alive() and self.deadline is None

    def job(self, request: Request, post: Callable[[Event], None]) -> Job:
        """Make a request's job: its settings over the defaults."""
        seed = self.seed if request.seed is None else request.seed
        most = self.most_tokens if request.most_tokens is None else request.most_tokens
        if most is None and not isinstance(request, Chat):
            most = COMPLETION_TOKENS
        settings = {**self.defaults, **request.sampling()}
        return Job(request, settings, secrets.randbits(63) if seed is None else seed, post, most)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises ApiError if the server stops."""
        if not self.is_open:
            raise ApiError(STOPPING, 503)
        self.inbox.put(job)

    def drain(self, grace: float) -> None:
        """Take no more jobs; what is in flight has so many seconds to end, and is then told that the server stops."""
        deadline = time.monotonic() + grace
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)
        self.inbox.put(None)

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        told = ApiError(STOPPING, 503)
        try:
            while self.turn():
                pass
        except Exception:
            log.exception("the worker has failed")
            told = ApiError("the server has failed: its log says why", 500)
        for text in self._texts():
            self._fail(text, told)
        for batch in list(self.batches):
            self._close(batch)

    def turn(self) -> bool:
        """Take what has come, give slots to it, and run a pass of every batch. Returns False when all is done."""
        self._receive(wait=not (self.waiting or self.batches or self.deadline))
        self._drop()
        if self.deadline is not None and (not self._texts() or time.monotonic() > self.deadline):
            return False
        self._place()
        for batch in list(self.batches):
            self._step(batch)
        if not self.waiting:
            self._close_idle()
        self._show()
        return True

    def _texts(self) -> list[TextInFlight]:
        return [*self.waiting, *(text for batch in self.batches for text in batch.texts)]

    def _show(self) -> None:
        self.metrics.gauges["num_requests_running"].set(sum(len(batch.texts) for batch in self.batches))
        self.metrics.gauges["num_requests_waiting"].set(len(self.waiting))

    def _receive(self, wait: bool) -> None:
        """Take new jobs, after waiting for one if there is nothing else to do."""
        while wait or not self.inbox.empty():
            job, wait = self.inbox.get(), False
            if job is not None:
                try:
                    texts = list(self._read(job))
                except Exception as error:
                    job.post(Event(error=as_api_error(error)))
                    continue
                self.metrics.count("prompt_tokens", job.prompt_tokens)
                job.post(Event(count=len(texts)))
                self.waiting.extend(texts)

    def _read(self, job: Job) -> Iterator[TextInFlight]:
        """Encode a job's prompts, and make its texts. Raises SpecdecError and ApiError."""
        is_chat, tokenizer = isinstance(job.request, Chat), self.decoder.tokenizer
        if is_chat and not getattr(tokenizer, "chat_template", None):
            raise ApiError(NO_TEMPLATE, param="messages")
        prompts = encode_prompts(job.request.prompts, tokenizer, self.decoder.target.vocab_size, context=None)
        n = job.request.n or 1
        if not prompts:
            raise ApiError("prompt is empty", param="prompt")
        if len(prompts) * n > MOST_TEXTS:
            raise ApiError(f"a request is for up to {MOST_TEXTS} texts, got {len(prompts) * n}", param="n")
        job.prompt_tokens = sum(map(len, prompts))
        for i, prompt in enumerate(prompts):
            where = "messages" if is_chat else "prompt" if len(prompts) == 1 else f"prompt {i}"
            self._check_length(job, len(prompt), where)
            for j in range(n):
                yield TextInFlight(job, i * n + j, prompt, Timing(job.asked))

    def _check_length(self, job: Job, tokens: int, where: str) -> None:
        """Raise ApiError, in OpenAI's manner, if a prompt of so many tokens and its text exceed the context.

        The server's --context is named where it is less than the model's: that much more could be served.
        """
        least = 1 if job.most_tokens is None else job.most_tokens
        if tokens + least <= self.context:
            return
        room = self.decoder.target.context
        raise ApiError(
            f"this model's maximum context length is {self.context} tokens"
            + (f" (--context of the server; the model has {room})" if room > self.context else "")
            + f", and the request needs {tokens + least}: {tokens} in the {where}, "
            f"{'at least 1' if job.most_tokens is None else least} in the completion. Reduce one of them",
            param="messages" if isinstance(job.request, Chat) else "prompt",
            code="context_length_exceeded",
        )

    def _drop(self) -> None:
        """End texts that nobody waits for."""
        for batch in self.batches:
            for text in [t for t in batch.texts if t.job.gone]:
                assert text.row is not None
                batch.call.cancel(text.row)
                self._end(text, "abort")
                batch.texts.remove(text)
        for text in [t for t in self.waiting if t.job.gone]:
            self._end(text, "abort")
            self.waiting.remove(text)

    # -- slots -----------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Give slots to those who wait, in order, until there is none for the first of them."""
        while self.waiting:
            text = self.waiting[0]
            try:
                batch = self._with_room(text.job.key) or self._open(text.job)
                if batch is None:
                    return
                self.waiting.popleft()
                self._start(text, batch)
            except Exception as error:
                if self.waiting and self.waiting[0] is text:
                    self.waiting.popleft()
                self._fail(text, as_api_error(error))

    def _with_room(self, key: tuple[Any, ...]) -> Batch | None:
        alike = [b for b in self.batches if b.key == key and b.call.free > 0]
        return max(alike, key=lambda b: b.call.slots, default=None)

    def _open(self, job: Job) -> Batch | None:
        """Open a call with as many slots as all texts of its settings need, to the next power of two."""
        self._close_idle()
        free = self.slots - sum(batch.call.slots for batch in self.batches)
        if free == 0:
            return None
        alike = sum(text.job.key == job.key for text in self._texts())
        slots = min(free, 1 << (alike - 1).bit_length())
        batch = Batch(job.key, self.decoder.live(slots, self.context, **job.settings))
        self.batches.append(batch)
        return batch

    def _close_idle(self) -> None:
        """Close batches without texts, whose slots others may need."""
        for batch in [batch for batch in self.batches if not batch.texts]:
            self._close(batch)

    def _close(self, batch: Batch) -> None:
        self.batches.remove(batch)
        batch.call.close()

    def _start(self, text: TextInFlight, batch: Batch) -> None:
        job = text.job
        most = self.context if job.most_tokens is None else job.most_tokens
        row = batch.call.add(text.prompt, job.seed, text.index, most, job.request.stops, bool(job.request.ignore_eos))
        text.row, text.stream = row, TextStream(row.stops.stop_strings)
        self.metrics.started(text.timing)
        batch.texts.append(text)

    # -- passes ----------------------------------------------------------------------------------------------------

    def _step(self, batch: Batch) -> None:
        """Run a pass of a batch and tell what it brought. A batch that fails ends with all its texts."""
        try:
            batch.call.step()
            self.metrics.passes.inc(batch.call.verify_passes - batch.passes)
            batch.passes = batch.call.verify_passes
            for text in list(batch.texts):
                if self._tell(text):
                    batch.texts.remove(text)
        except Exception as error:
            if not isinstance(error, SpecdecError):
                log.exception("a pass failed")
            for text in batch.texts:
                self._fail(text, ApiError(f"decoding failed: {error}", 500))
            self._close(batch)

    def _tell(self, text: TextInFlight) -> bool:
        """Post what is new of a text. Returns True if it has ended."""
        row, stream, job = text.row, text.stream, text.job
        assert row is not None and stream is not None
        self._count(text)
        if row.size > len(row.prompt):
            self.metrics.progressed(text.timing)
        if row.finish_reason is None:
            new = stream.piece(row.text()) if job.request.stream else ""
            if new:
                job.post(Event(index=text.index, piece=Piece(new, tokens=self._tokens(text))))
            return False
        if row.finish_reason not in REASONS:
            self._fail(text, ApiError(f"decoding failed: {row.error}", 500))
            return True
        job.rounds += row.records
        self._end(text, REASONS[row.finish_reason])
        rest = Piece(stream.rest(row.text()), row.finish_reason, self._tokens(text))
        job.post(Event(index=text.index, piece=rest))
        return True

    def _tokens(self, text: TextInFlight) -> list[Likely]:
        """Return the tokens since the last piece, if their log-probabilities are asked for."""
        row, found = text.row, []
        assert row is not None
        ids = row.output[text.told : len(row.logprobs)]
        for i, token in enumerate(ids, text.told):
            word = row.stops.decode([token])
            others = row.top_logprobs[i] if row.top_logprobs else []
            likely = [(row.stops.decode([other]), logprob) for other, logprob in others]
            found.append(Likely(word, row.logprobs[i], likely, text.length))
            text.length += len(word)
        text.told = len(row.logprobs)
        return found

    def _count(self, text: TextInFlight) -> None:
        """Count the rounds of a text that have ended since it was last counted."""
        if text.row is not None:
            new = text.row.records[text.counted :]
            self.metrics.rounds(new)
            text.counted += len(new)

    def _end(self, text: TextInFlight, reason: str) -> None:
        self._count(text)
        tokens = 0 if text.row is None else text.row.size - len(text.row.prompt)
        self.metrics.finished(text.timing, reason, tokens)

    def _fail(self, text: TextInFlight, error: ApiError) -> None:
        self._end(text, "error")
        text.job.gone = True  # its other texts end as well
        text.job.post(Event(index=text.index, error=error))
