"""What the verbs print: JSON, tables, coloured text, progress."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from specdec.cli.quiet import warn as warn
from specdec.files.texts import duration as duration
from specdec.files.texts import finite as finite
from specdec.research.bench import tables
from specdec.research.bench.tables import figure as number
from specdec.research.colours import colour_of, on_any_ground
from specdec.research.loops import loop_share
from specdec.stats import PER_DRAFTED_ROUND, RATES

PARTS = 100  # that a share is counted in
LOG_EVERY = 30.0  # seconds between lines of progress off a terminal
LONGEST_NAME = 24  # of a word in a table's first column that is always whole
WIDTH, RULE = 10_000, 80  # where the output is not a terminal: a table is as wide as it needs, and a line is not


class _File(Console):
    """Standard output that is no terminal."""

    def rule(self, title: Any = "", **style: Any) -> None:
        """Draw a line of a usual length."""
        self.print(Rule(title, **style), width=RULE)


def stdout() -> Console:
    """Standard output as it is now."""
    console = Console(highlight=False)
    return console if console.is_terminal else _File(highlight=False, width=WIDTH)


def print_json(data: Any) -> None:
    """One JSON document; NaN and infinities, which JSON lacks, as null."""
    json.dump(finite(data), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


@contextmanager
def share_done(what: str) -> Iterator[Callable[[float], None]]:
    """Progress of something that knows which share of it is done, from 0 to 1: yields a function that is told."""
    with progress(what, PARTS, " %") as advance:
        told = 0

        def tell(share: float) -> None:
            nonlocal told
            while told < int(PARTS * share):
                told += 1
                advance()

        yield tell


@contextmanager
def progress(what: str, steps: int | None = None, unit: str = "") -> Iterator[Any]:
    """A line on standard error while something runs. Yields a function to call after each of `steps` steps."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with LogLines(what, steps, unit) as lines:
            yield lines.advance
        return
    bar = [BarColumn(), TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}}{unit}")] if steps else []
    left = [TextColumn("left"), TimeRemainingColumn()] if steps else []
    columns = [SpinnerColumn(), TextColumn("{task.description}"), *bar, TimeElapsedColumn(), *left]
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(what, total=steps)

        def advance(description: str | None = None) -> None:
            shown.update(task, advance=_counts(description), description=description or what)
            if steps and shown.tasks[0].completed > steps:
                shown.update(task, completed=steps)

        yield advance


def _counts(description: str | None) -> int:
    """Loading is named, and counted as no step."""
    return 0 if (description or "").startswith("loading") else 1


class LogLines:
    """Progress where standard error is no terminal: a line every LOG_EVERY seconds, also during one long step."""

    def __init__(self, what: str, steps: int | None, unit: str = "") -> None:
        self.what, self.steps, self.unit, self.step, self.done = what, steps, unit, "", 0
        self.stream, self.started = sys.stderr, time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def advance(self, description: str | None = None) -> None:
        """Count a step."""
        self.done, self.step = self.done + _counts(description), description or ""

    def line(self, seconds: float) -> str:
        """What is said after so many seconds."""
        counted = f": {min(self.done, self.steps)} of {self.steps}{self.unit}" if self.steps else ""
        parts = [self.what + counted]
        parts += [self.step] * bool(self.step) + [f"{duration(seconds)} so far"]
        if self.steps and self.done > 1:
            parts.append(f"about {duration(seconds * max(0, self.steps - self.done) / self.done)} left")
        return ", ".join(parts)

    def __enter__(self) -> LogLines:
        self.thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.ended.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.ended.wait(LOG_EVERY):
            print(self.line(time.monotonic() - self.started), file=self.stream, flush=True)


@contextmanager
def on_interrupt(message: Callable[[], str]) -> Iterator[None]:
    """Say what is left where the user interrupts: the command line prints what the KeyboardInterrupt holds."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(message()) from None


def table(*columns: str, title: str | None = None, whole_names: bool = False) -> Table:
    """A table whose first column holds names and the others numbers. whole_names: never cut or wrap the names."""
    made = Table(title=title, title_justify="left", header_style="bold", min_width=len(title or ""))
    for i, column in enumerate(columns):
        # Numbers are never cut: what does not fit is broken.
        justify: Any = "left" if i == 0 else "right"
        overflow: Any = "ellipsis" if i == 0 else "fold"
        made.add_column(column, justify=justify, overflow=overflow, no_wrap=whole_names and i == 0)
    return made


def rendered(made: tables.Table, styles: Sequence[str] = (), whole_names: bool = True) -> Table:
    """A table of figures; styles: of its rows."""
    shown = table(*made.heads, title=made.title, whole_names=whole_names)
    words = [word for row in made.rows for word in row[0].split()]
    shown.columns[0].min_width = min(LONGEST_NAME, max(map(len, words), default=1))
    for i, row in enumerate(made.rows):
        shown.add_row(*map(escape, row), style=styles[i] if styles else "")
    return shown


def facts(entries: Mapping[str, Any], **styles: str) -> Table:
    """A table of named figures: whole numbers get separators, other values are texts. styles: of rows, by name."""
    made = table("figure", "value")
    for name, value in entries.items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        made.add_row(Text(name.replace("_", " ")), Text(shown), style=styles.get(name, ""))
    return made


def colours(strategies: Sequence[str]) -> dict[str, str]:
    """One colour a strategy, as in plots (research/colours.py)."""
    return {name: on_any_ground(colour_of(name)) for name in strategies}


def coloured(tokenizer: Any, ids: Sequence[int], origins: Sequence[str | None], palette: Mapping[str, str]) -> Text:
    """The text of a row, each stretch in the colour of the strategy that proposed it; the target's own is plain.

    A character whose bytes come from several tokens has the colour of the last of them.
    """
    text, sent = Text(), ""
    for end in range(1, len(ids) + 1):
        if end < len(ids) and origins[end] == origins[end - 1]:
            continue
        known = tokenizer.decode(list(ids[:end]), skip_special_tokens=True)
        if end < len(ids):
            known = known.rstrip("\ufffd")
        if known.startswith(sent):
            text.append(known[len(sent) :], style=palette.get(origins[end - 1] or "", ""))
            sent = known
    return text


def legend(palette: Mapping[str, str]) -> Text:
    """Names in their colours."""
    text = Text("proposed by ")
    for name, colour in palette.items():
        text.append(name, style=colour).append(", ")
    return text.append("the target itself (plain)")


def strategy_table(stats: Mapping[str, Any]) -> Table:
    """Acceptance by strategy, from `Stats.to_dict()`."""
    made = table("strategy", "drafts", "drafted", "accepted", *RATES, "length", "draft ms", title="By strategy")
    for name, entry in stats["strategies"].items():
        counts = [str(entry[key]) for key in ("drafted_rounds", "draft_tokens", "accepted_tokens")]
        rates = [number(entry[key]) for key in (*RATES.values(), "acceptance_length")]
        made.add_row(name, *counts, *rates, f"{entry['t_draft'] * 1e3:.0f}")
    return made


def position_table(stats: Mapping[str, Any], most: int = 8) -> Table:
    """Share of drafted rounds that accepted the token at each position, by strategy."""
    entries = {"all": stats, **stats["strategies"]}
    longest = min(most, max((len(e["acceptance_rate_per_position"]) for e in entries.values()), default=0))
    title = f"{PER_DRAFTED_ROUND}, by position in the draft"
    made = table("strategy", *(str(i + 1) for i in range(longest)), title=title)
    for name, entry in entries.items():
        rates = entry["acceptance_rate_per_position"][:longest]
        made.add_row(name, *(f"{r:.2f}" for r in rates))
    return made


def counter_table(stats: Mapping[str, Any]) -> Table:
    """llama.cpp's counters of every strategy."""
    counts = ("n_gen_drafts", "n_acc_drafts", "n_gen_tokens", "n_acc_tokens")
    heads = ("calls b/d/a", "gen drafts", "acc drafts", "gen tokens", "acc tokens", "ms b/d/a")
    made = table("strategy", *heads, title="llama.cpp's counters (b/d/a = begin, draft, accept)")
    for name, e in stats["strategies"].items():
        calls = "/".join(str(e[f"n_call_{key}"]) for key in ("begin", "draft", "accept"))
        times = "/".join(f"{e[f't_{key}'] * 1e3:.1f}" for key in ("begin", "draft", "accept"))
        made.add_row(name, calls, *(str(e[key]) for key in counts), times)
    return made


def time_text(time: Mapping[str, float]) -> str:
    """The split of a call's time, in per cent."""
    total = max(time["total"], 1e-9)
    return ", ".join(f"{name} {time[name] / total:.0%}" for name in ("prefill", "draft", "verify", "other"))


def print_loops(console: Console, texts: Sequence[Sequence[int]]) -> None:
    """Say how much of the texts is in loops, if anything."""
    if share := loop_share(texts):
        line = f"{share:.0%} of the tokens are in loops: a text that repeats one piece is easily drafted"
        console.print(line, style="yellow", soft_wrap=True)


def print_context(console: Console, ended: int, texts: int) -> None:
    """Say that texts end where the context does, if any."""
    if ended:
        line = f"{ended} of {texts} texts ended at the context's limit, before their end and before max_new_tokens"
        console.print(line, style="yellow", soft_wrap=True)
