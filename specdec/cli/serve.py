"""`specdec serve`: a pair under OpenAI's API (docs/serving.md)."""

from __future__ import annotations

import importlib
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import output
from specdec.cli.inputs import base_run, given, with_options
from specdec.cli.options import AllGeneration, Models, Run, with_groups
from specdec.errors import SpecdecError
from specdec.files.texts import read_text

if TYPE_CHECKING:
    from specdec.decoder import SpeculativeDecoder

SLOTS = 32
CONTEXT = 4096  # tokens of a text and its prompt, where the model has room for them
FAREWELL = 5  # seconds, after those of --grace, for connections to end


@with_groups
def serve(
    models: Models,
    run: Run,
    generation: AllGeneration,
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's are open to all.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = any that is free.")] = 8000,
    context: Annotated[
        int | None, typer.Option(min=2, help=f"Most tokens of a prompt and its text. Default: up to {CONTEXT}.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests. Default: the target's.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A chat template, in place of the tokenizer's.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that requests have to end when the server stops.")] = 30,
    translate: Annotated[bool, typer.Option("--translate", help="Draft through text: another vocabulary.")] = False,
    attn_implementation: Annotated[str | None, typer.Option(help="sdpa or eager in place of specdec's own.")] = None,
) -> None:
    """Serve completions and chats until SIGTERM or Ctrl-C. Generation options are defaults for requests."""
    from specdec.config import check_number
    from specdec.research.demo import load_decoder

    check_number("--grace", grace, 0, 86_400)
    serving = _serving()
    base = base_run(run.config, {**models.given(), **given(attn_implementation=attn_implementation)})
    made = with_options(base, generation.settings(), run.strategies, translate)
    for option in ("num_return_sequences", "keep_state", "output_logprobs", "shard"):
        if option in made.generation:
            raise SpecdecError(f"{option} is no option of a server: requests say what they want")
    template = None if chat_template is None else read_text(chat_template, "chat template")
    with _bound(host, port) as listener:
        with output.progress("loading"):
            decoder = load_decoder(made)
        if decoder.tokenizer is None:
            raise SpecdecError("a server needs a tokenizer, and the target has none")
        if template is not None:
            decoder.tokenizer.chat_template = template
        worker = start_worker(serving, decoder, dict(made.generation), context, name)
        _serve(serving, worker, listener, grace)


def _serving() -> Any:
    """The modules that need the extra. Raises SpecdecError without it."""
    try:
        return importlib.import_module("specdec.cli.serving.app")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("specdec"):
            raise
        raise SpecdecError(f"a server needs the package {error.name}: pip install specdec[serve]") from None


def _bound(host: str, port: int) -> socket.socket:
    """Take the address, before models are loaded. Raises SpecdecError if it is taken or not this machine's."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just stopped still has connections
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise SpecdecError(f"{host}, port {port}: {error.strerror}; --port 0 finds a free one") from None
    return made


def start_worker(
    serving: Any, decoder: SpeculativeDecoder, options: dict[str, Any], context: int | None, name: str | None
) -> Any:
    """Start the worker. Raises SpecdecError for options that the models refuse, and under `torchrun`."""
    from specdec.models.names import model_name

    if decoder.ranks.size > 1:
        raise SpecdecError("a server is one process: start it without torchrun; --device-map auto uses several GPUs")
    slots = options.pop("batch_size", None) or SLOTS
    room = decoder.target.context
    if context is not None and context > room:
        raise SpecdecError(f"--context {context}: the target's context is {room}")
    model = name or model_name(decoder.target.model)["name"] or "target"
    with decoder.live(1, 1, **{k: v for k, v in options.items() if k != "seed"}):
        pass  # what only the models can refuse is refused now
    metrics = serving.Metrics(model)
    worker = serving.Worker(decoder, metrics, {"temperature": 1.0, **options}, slots, context or min(room, CONTEXT))
    worker.start()
    return worker


def _serve(serving: Any, worker: Any, listener: socket.socket, grace: float) -> None:
    app = serving.make_app(worker, worker.metrics.model, int(time.time()))
    config = serving.uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(grace) + FAREWELL
    )
    host, port = listener.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    print(f"serving {worker.metrics.model} at http://{where}:{port}/v1", file=sys.stderr, flush=True)
    serving.Server(config, worker, grace).run(sockets=[listener])
    worker.join(FAREWELL)
