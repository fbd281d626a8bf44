"""The command line: `specdec demo | generate | serve | check | bench | compare | ablate | results | lookup | trace |
train | export | export-head`.

Every verb prints tables for people, or with `--json` one JSON document on standard output and nothing else there;
progress and errors go to standard error. Exit status: 0, 1 = a check failed, 2 = bad input (one line says what),
130 = interrupted, 143 = ended by SIGTERM; both say what is kept.
"""

from __future__ import annotations

import errno
import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from specdec.errors import SpecdecError, unknown_name
from specdec.files.habits import typed
from specdec.files.own_code import search_folder
from specdec.version import __version__

BAD_INPUT, INTERRUPTED, TERMINATED = 2, 130, 143
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HELP = {"help_option_names": ["-h", "--help"]}


VERBS = {
    "demo": "Decode with the embedded pair, and show who proposed what.",
    "generate": "Generate from prompts, with any target and drafters.",
    "serve": "Serve a pair under OpenAI's API, on this machine.",
    "check": "Say whether a target and a draft work together, and what memory they need.",
    "bench": "Measure speed against transformers and other implementations.",
    "compare": "Rank drafts and strategies for one target, and say why they differ.",
    "ablate": "Run a grid of settings from a file, resumable, with a report.",
    "results": "Group the figures of an ablation or a trace: tables, CSV, LaTeX.",
    "lookup": "Make, merge, measure and show llama.cpp's lookup-cache files.",
    "trace": "Record every round of a run, and show it.",
    "train": "Train a drafter, an EAGLE-3 head or a draft model, on its target's answers.",
    "export": "Write a chain in the options of vLLM, SGLang and llama.cpp.",
    "export-head": "Write an EAGLE head in the layout of another engine.",
}


class Verbs(TyperGroup):
    """The group of verbs; turns every error of the user's into one line and an exit status.

    A verb's module is imported when the verb is run: for a list of verbs their names and a line each are enough. It
    imports torch, transformers and what needs them inside its functions: help and mistyped options need none of it.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=VERBS[cmd_name]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise unknown_name("command", args[0], VERBS)
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_verb(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            print(f"interrupted: {error}" if str(error) else "interrupted", file=sys.stderr)
            raise

    def main(self, args: Any = None, *arguments: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # texts and names that the terminal's encoding lacks
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        if any("\0" in str(argument) for argument in args or ()):
            sys.exit(_fail("an argument holds a NUL character: no name and no text can"))
        search_folder(".")  # for `my_module:MyDrafter`
        terminated: list[int] = []
        try:
            with terminating(terminated):
                status = super().main(args, *arguments, **{**options, "standalone_mode": False})
        except SpecdecError as error:
            status = _fail(str(error))
        except KeyboardInterrupt:
            status = INTERRUPTED
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            named = f" for {error.filename}" if error.filename else ""
            status = _fail(f"{error.strerror}{named}: free some, or write elsewhere; files of before are whole")
        except Exception as error:
            # Usage errors and aborts, by what they offer: typer has its own copies of click's classes in some releases.
            if hint := typed(str(getattr(error, "option_name", "")), sys.argv[1:] if args is None else args):
                status = _fail(f"there is no option {error.option_name} here: {hint}")  # type: ignore[attr-defined]
            elif hasattr(error, "format_message"):
                status = _fail(f"{error.format_message().rstrip('.')}; see specdec --help")
            elif type(error).__name__ == "Abort":
                status = INTERRUPTED
            else:
                raise
        if terminated and status == INTERRUPTED:
            status = TERMINATED
        sys.exit(status if isinstance(status, int) else 0)


@contextmanager
def terminating(came: list[int]) -> Iterator[None]:
    """Let SIGTERM, which schedulers send, interrupt like Ctrl-C, so that what is there is kept. The signal is noted in
    `came`; further ones are ignored, since they would interrupt the keeping. Only the main thread can do this, and a
    process that was started with SIGTERM ignored goes on ignoring it."""

    def interrupt(number: int, frame: Any) -> None:
        if not came:
            came.append(number)
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_IGN:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        with suppress(ValueError, TypeError):  # nor one that Python did not set
            signal.signal(signal.SIGTERM, before)


def load_verb(name: str) -> Any:
    """The command of a verb: its module has a function of its name, or an `app` with several."""
    identifier = name.replace("-", "_")
    module = importlib.import_module(f"specdec.cli.{identifier}")
    made = getattr(module, "app", None)
    if made is None:
        made = typer.Typer(add_completion=False)
        made.command(name, context_settings=HELP)(getattr(module, identifier))
    command: Any = typer.main.get_command(made)
    command.name = name
    for run in getattr(command, "commands", {"": command}).values():  # after parsing: help and typos load no library
        run.callback = importlib.import_module("specdec.cli.quiet").quiet()(run.callback)
    return command


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


app = typer.Typer(
    cls=Verbs,
    help="Speculative decoding on Hugging Face models: see it run, measure it, check a pair.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding on Hugging Face models: see it run, measure it, check a pair."""


def main() -> None:
    """Entry point of the console script."""
    app()
