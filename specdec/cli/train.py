"""`specdec train eagle3 | draft | exit CONFIG`: train a drafter on its target's answers. Resumes where it stopped."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli import output
from specdec.cli.options import AsJson
from specdec.files.texts import check_readable, check_writable
from specdec.stats import PER_TESTED

app = typer.Typer(
    help="Train a drafter on what its target would write (docs/training.md). Resumes where it stopped.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)

Config = Annotated[Path, typer.Argument(help="The YAML file: configs/train_*.yaml.")]
Out = Annotated[str | None, typer.Option(help="The run's folder, in place of the file's.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda[:n].")]
Search = Annotated[bool, typer.Option("--search", help="Train nothing: search layers that `skip` can leave out.")]
Part = Annotated[str | None, typer.Option("--answers", help="Only write this part of the answers, such as 0/4.")]


def _verb(kind: str, what: str) -> None:
    """Make the verb that trains one kind of drafter."""

    def train(
        config: Config, out: Out = None, device: Device = None, answers: Part = None, as_json: AsJson = False
    ) -> None:
        _train(kind, config, {"out": out, "device": device}, answers, as_json)

    app.command(kind, help=what)(train)


_verb("eagle3", "Train an EAGLE-3 head; it is in the folder `head` of the run.")
_verb("draft", "Distil a draft model; it is in the folder `draft` of the run.")


@app.command("exit")
def exit_(
    config: Config,
    out: Out = None,
    device: Device = None,
    answers: Part = None,
    search: Search = False,
    as_json: AsJson = False,
) -> None:
    """Train an adapter for early-exit; it is in the folder `adapter` of the run."""
    if search:
        _search(config, {"out": out, "device": device}, as_json)
    else:
        _train("exit", config, {"out": out, "device": device}, answers, as_json)


def _search(file: Path, options: dict[str, Any], as_json: bool) -> None:
    """Print the best sets of layers to leave out, the fastest first."""
    check_readable(file, what="config file")
    from specdec.training.config import load_training
    from specdec.training.run import run_search

    config = load_training(file, "exit", **{name: value for name, value in options.items() if value is not None})
    with output.progress("loading") as advance:
        found = run_search(config, advance)
    if as_json:
        output.print_json([{**asdict(one), "strategy": one.strategy} for one in found])
        return
    made = output.table("strategy", PER_TESTED, "cost c", "predicted", title="Layers to leave out, teacher-forced")
    for one in found[:10]:
        made.add_row(one.strategy, *(output.number(n) for n in (one.acceptance, one.cost, one.speedup)))
    output.stdout().print(made)


def _train(kind: str, file: Path, options: dict[str, Any], part: str | None, as_json: bool) -> None:
    check_readable(file, what="config file")
    from specdec.decoding.shard import Shard  # training is loaded only where it is asked for
    from specdec.training.checkpoint import CHECKPOINT
    from specdec.training.config import load_training
    from specdec.training.loop import DivergedError
    from specdec.training.run import RESULT, run_training

    config = load_training(file, kind, **{name: value for name, value in options.items() if value is not None})
    check_writable(config.folder, "the run's folder", folder=True)
    parsed = None if part is None else Shard.parse(part, "part")

    def kept() -> str:
        trained = (config.folder / CHECKPOINT).is_file()
        what = "the last checkpoint is" if trained else "the answers so far are kept"
        return f"{what} in {config.folder}; the same command goes on from there"

    try:
        with output.on_interrupt(kept), output.progress("training") as advance:
            log = run_training(config, kind, advance, parsed)
    except DivergedError as error:  # nothing is wrong with the input: a check failed
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    result = str(config.folder / RESULT[kind])
    if as_json:
        output.print_json({"log": log, "result": None if log is None else result})
    elif log is not None:
        _print(output.stdout(), log, result)


def _print(console: Console, log: list[dict[str, Any]], result: str) -> None:
    """Held-out acceptance while training, both ways side by side."""
    measured = [entry for entry in log if "teacher_forced" in entry]
    most = max(len(entry.get("free_running", entry["teacher_forced"])) for entry in measured)
    made = output.table(
        "step",
        "loss",
        *(f"{i + 1}" for i in range(most)),
        "length",
        "s",
        title="Held-out acceptance by position: expected on the target's texts / of tokens tested in decoding",
    )
    for entry in measured:
        shown = [_pair(entry["teacher_forced"], entry.get("free_running", []), i) for i in range(most)]
        length = output.number(entry.get("acceptance_length"))
        made.add_row(str(entry["step"]), output.number(entry["loss"]), *shown, length, f"{entry['seconds']:.0f}")
    console.print(made)
    console.print(f"written: {result}", soft_wrap=True, markup=False)


def _pair(forced: list[float], free: list[float | None], i: int) -> str:
    pair = (part[i] if i < len(part) else None for part in (forced, free))
    return " / ".join("-" if rate is None else f"{rate:.2f}" for rate in pair)
