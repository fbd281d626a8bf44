"""The HTTP side: OpenAI's endpoints over one worker. It reads requests and writes answers; it decodes nothing."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from specdec.cli.serving.metrics import Metrics as Metrics
from specdec.cli.serving.protocol import Answer, ApiError, Chat, Completion, Piece, Request, parse, usage
from specdec.cli.serving.worker import Event, Job, Worker
from specdec.version import __version__

FINGERPRINT = f"specdec-{__version__}"
DONE = "data: [DONE]\n\n"
LARGEST = 16 * 2**20  # bytes of a request


class Endpoint:
    """What the endpoints share: a worker, and the name that its model is served under."""

    def __init__(self, worker: Worker, model: str, created: int):
        self.worker, self.model, self.created = worker, model, created

    def card(self) -> dict[str, Any]:
        """The model, as /v1/models lists it."""
        return {
            "id": self.model, "object": "model", "created": self.created, "owned_by": "specdec",
            "max_model_len": self.worker.context,
        }  # fmt: skip

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served."""
        if name not in (None, self.model):
            message = f"the model {name!r} is not served here; this is {self.model!r}"
            raise ApiError(message, 404, "model", "model_not_found")

    async def answer(self, http: HttpRequest, kind: type[Request]) -> Response:
        """Answer a request for texts. Raises ApiError."""
        request = parse(kind, await _body(http))
        self.check_model(request.model)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        job = self.worker.job(request, lambda event: _post(loop, events, event))
        self.worker.submit(job)
        answer = Answer(request, self.model, FINGERPRINT)
        texts = (await _next(events)).count
        if request.stream:
            return EventStream(job, _stream(job, answer, events, texts))
        gone = asyncio.ensure_future(_until_gone(http))
        whole = asyncio.ensure_future(_whole(job, answer, events, texts))
        try:
            await asyncio.wait((gone, whole), return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(await whole) if whole.done() else Response(status_code=499)  # nobody reads it
        finally:
            job.gone = True
            gone.cancel()
            whole.cancel()


def make_app(worker: Worker, model: str, created: int) -> FastAPI:
    """Make the application; the worker runs already."""
    app = FastAPI(title="specdec", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    endpoint = Endpoint(worker, model, created)

    @app.post("/v1/completions")
    async def completions(http: HttpRequest) -> Response:
        return await endpoint.answer(http, Completion)

    @app.post("/v1/chat/completions")
    async def chat(http: HttpRequest) -> Response:
        return await endpoint.answer(http, Chat)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [endpoint.card()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        endpoint.check_model(name)
        return endpoint.card()

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok" if worker.is_open else "stopping"}, 200 if worker.is_open else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(worker.metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.exception_handler(ApiError)
    async def refused(_: HttpRequest, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status)

    @app.exception_handler(HTTPException)
    async def no_such_place(http: HttpRequest, error: HTTPException) -> JSONResponse:
        message = f"{http.method} {http.url.path}: {error.detail}"
        return JSONResponse(ApiError(message, error.status_code).body(), error.status_code)

    return app


# -- one request -------------------------------------------------------------------------------------------------------


async def _body(http: HttpRequest) -> bytes:
    """Read a request's body. Raises ApiError for one that is too long to be a prompt."""
    body = bytearray()
    try:
        async for part in http.stream():
            body += part
            if len(body) > LARGEST:
                raise ApiError(f"a request has at most {LARGEST} bytes", 413)
    except ClientDisconnect:
        raise ApiError("the request ended before its body did", 400) from None
    return bytes(body)


def _post(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], event: Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, event)


async def _next(events: asyncio.Queue[Event]) -> Event:
    """Wait for the next event. Raises the ApiError that it brings."""
    event = await events.get()
    if event.error is not None:
        raise event.error
    return event


async def _until_gone(http: HttpRequest) -> None:
    """Return when the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _whole(job: Job, answer: Answer, events: asyncio.Queue[Event], count: int) -> dict[str, Any]:
    ends: dict[int, Piece] = {}
    while len(ends) < count:
        event = await _next(events)
        if event.piece is not None:
            ends[event.index] = event.piece
    return answer.whole([ends[i] for i in range(count)], usage(job.prompt_tokens, job.rounds, job.seed))


class EventStream(StreamingResponse):
    """Server-sent events of a job. When they end, or the client leaves, nobody waits for it any more."""

    def __init__(self, job: Job, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.job = job

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self.job.gone = True


async def _stream(job: Job, answer: Answer, events: asyncio.Queue[Event], count: int) -> AsyncIterator[str]:
    """Yield server-sent events, from the first piece to the last; an error that comes on the way is one of them."""
    try:
        for index in range(count if answer.chat else 0):
            yield _sent(answer.opening(index))
        while count:
            event = await _next(events)
            if event.piece is not None:
                yield _sent(answer.chunk(event.index, event.piece))
                count -= event.piece.reason is not None
        if job.request.wants_usage:
            yield _sent(answer.last_chunk(usage(job.prompt_tokens, job.rounds, job.seed)))
    except ApiError as error:
        yield _sent(error.body())
    yield DONE


def _sent(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


# -- the process -------------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn's server, which tells the worker when it stops: requests in flight have `grace` seconds to end."""

    def __init__(self, config: uvicorn.Config, worker: Worker, grace: float):
        super().__init__(config)
        self.worker, self.grace = worker, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second signal does not wait for what is in flight. The process then ends with status 0."""
        if self.should_exit:
            self.worker.drain(0.0)
            self.force_exit = sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, *arguments: Any, **options: Any) -> None:
        self.worker.drain(self.grace)
        await super().shutdown(*arguments, **options)
