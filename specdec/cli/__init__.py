"""The command line: `specdec demo | generate | check | bench | compare | ablate | lookup | trace`.

Every verb prints tables for people, or with `--json` one JSON document on standard output and nothing else there;
progress and errors go to standard error. Exit status: 0, 1 = a check failed, 2 = bad input (one line says what),
130 = interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specdec.cli import ablate, bench, check, compare, demo, generate, lookup, trace
from specdec.cli.output import quiet
from specdec.errors import SpecdecError
from specdec.files.own_code import search_folder
from specdec.version import __version__

BAD_INPUT, INTERRUPTED = 2, 130


class Verbs(TyperGroup):
    """The group of verbs; turns every error of the user's into one line and an exit status."""

    def main(self, args: Any = None, *arguments: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # texts and names that the terminal's encoding lacks
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        if any("\0" in str(argument) for argument in args or ()):
            sys.exit(_fail("an argument holds a NUL character: no name and no text can"))
        search_folder(".")  # for `my_module:MyDrafter`
        try:
            with quiet():
                status = super().main(args, *arguments, **{**options, "standalone_mode": False})
        except SpecdecError as error:
            status = _fail(str(error))
        except KeyboardInterrupt:
            status = INTERRUPTED
        except Exception as error:
            # Usage errors and aborts, by what they offer: typer has its own copies of click's classes in some releases.
            if hasattr(error, "format_message"):
                status = _fail(f"{error.format_message().rstrip('.')}; see specdec --help")
            elif type(error).__name__ == "Abort":
                status = INTERRUPTED
            else:
                raise
        sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


app = typer.Typer(
    cls=Verbs,
    help="Speculative decoding on Hugging Face models: see it run, measure it, check a pair.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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


app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.command("compare")(compare.compare)
app.add_typer(ablate.app, name="ablate")
app.add_typer(lookup.app, name="lookup")
app.add_typer(trace.app, name="trace")


def main() -> None:
    """Entry point of the console script."""
    app()
