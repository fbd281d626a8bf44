"""Shows results and decoders in a notebook: a short `repr`, and small tables as HTML.

Tables have no colours of their own, so that they are readable on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from specdec.models.names import model_name

if TYPE_CHECKING:
    from specdec.decoder import SpeculativeDecoder
    from specdec.decoding.result import Generation, GenerationRow
    from specdec.stats import Stats, Tally

MOST_ROWS = 20  # shown of a result
LONGEST_TEXT, LONGEST_CELL = 60, 400  # characters of a row's text in a line, and in a table
NUMBERS = "text-align:right"
TEXT = "text-align:left;white-space:pre-wrap;overflow-wrap:anywhere"


# -- text -------------------------------------------------------------------------------------------------------------


def generation_repr(out: Generation) -> str:
    """Write one line about the call, then one a row."""
    head = f"Generation: {_count(len(out), 'row')}, {_summary(out.stats)}"
    lines = [f"  {_row_line(row)}" for row in _first(out)]
    if len(out) > MOST_ROWS:
        lines.append(f"  ... and {_count(len(out) - MOST_ROWS, 'more row')}")
    return "\n".join([head, *lines])


def row_repr(row: GenerationRow) -> str:
    """Write one line about a row."""
    return f"row {_row_line(row)}"


def stats_repr(stats: Stats) -> str:
    """Write the figures that are looked at first, in one line."""
    total = stats.total
    parts = [_count(len(stats.rows), "row"), _count(total.rounds, "round"), _summary(stats)]
    rates = (("per tested", total.conditional_acceptance_rate), ("per drafted", total.draft_acceptance_rate))
    parts += [f"{value:.2f} accepted {name}" for name, value in rates if value is not None]
    return f"Stats({', '.join(parts)})"


def decoder_repr(decoder: SpeculativeDecoder) -> str:
    """Write the models, where they are, and the chain."""
    models = ", ".join(
        f"{entry['role']}={entry['model']} ({entry['device']}, {entry['dtype']})" for entry in _models(decoder)
    )
    return f"SpeculativeDecoder({models}, strategies=[{', '.join(d.name for d in decoder.strategies)}])"


def _row_line(row: GenerationRow) -> str:
    ended = row.finish_reason if row.error is None else f"{row.finish_reason}: {row.error}"
    text = "" if row.text is None else f": {_cut(row.text, LONGEST_TEXT)!r}"
    count = _count(len(row.token_ids), "token")
    return f"{row.index}: {count}, {_number(row.stats.tokens_per_round)} per round, {_cut(ended, LONGEST_TEXT)}{text}"


def _summary(stats: Stats) -> str:
    speed = stats.tokens_per_second
    parts = [_count(stats.emitted_tokens, "token"), f"{_number(stats.total.tokens_per_round)} per round"]
    return ", ".join(parts if speed is None else [*parts, f"{speed:.1f} per second"])


# -- HTML -------------------------------------------------------------------------------------------------------------


ROW = ("row", "tokens", "tokens per round", "finish reason", "text")
COUNTS = ("rounds", "drafted rounds", "drafted", "tested", "accepted", "accepted per tested", "accepted per drafted")


def row_html(row: GenerationRow) -> str:
    """Show a row as a line of `generation_html`, then its figures."""
    return _table(ROW, [_row_cells(row)], texts=2) + _table(COUNTS, [_figures(row.stats)], texts=0)


def _row_cells(row: GenerationRow) -> tuple[Any, ...]:
    ended = row.finish_reason if row.error is None else f"{row.finish_reason}: {row.error}"
    text = " ".join(map(str, row.token_ids)) if row.text is None else row.text
    return row.index, len(row.token_ids), _number(row.stats.tokens_per_round), ended, text


def generation_html(out: Generation) -> str:
    """Show figures of the call, then its rows."""
    rows = [_row_cells(row) for row in _first(out)]
    note = f"{_count(len(out), 'row')}, {_summary(out.stats)}"
    if len(out) > MOST_ROWS:
        note += f"; the first {MOST_ROWS} rows:"
    if out.lossy:
        note += "; lossy: the acceptance rule changes the distribution of the text"
    return f"<p>{escape(note)}</p>{_table(ROW, rows, texts=2)}"


def stats_html(stats: Stats) -> str:
    """Show figures of all rounds and of each strategy's."""
    entries = {"all": stats.total, **stats.by_strategy()}
    rows = [(*_figures(tally), name) for name, tally in entries.items()]
    return f"<p>{escape(_summary(stats))}</p>{_table((*COUNTS, 'strategy'), rows, texts=1)}"


def decoder_html(decoder: SpeculativeDecoder) -> str:
    """Show the models and the chain."""
    models = _models(decoder)
    chain = [(i + 1, f"{d.name} {_options(d.parameters())}") for i, d in enumerate(decoder.strategies)]
    facts = _table(tuple(models[0]), [tuple(entry.values()) for entry in models], texts=len(models[0]))
    return facts + _table(("asked", "strategy"), chain, texts=1)


def _figures(tally: Tally) -> tuple[Any, ...]:
    counts = (tally.rounds, tally.drafted_rounds, tally.draft_tokens, tally.tested_tokens, tally.accepted_tokens)
    return (*counts, _number(tally.conditional_acceptance_rate), _number(tally.draft_acceptance_rate))


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]], texts: int) -> str:
    """Make a table whose last `texts` columns hold text and the others numbers."""
    styles = [NUMBERS] * (len(heads) - texts) + [TEXT] * texts
    head = "".join(f'<th style="{style}">{escape(name)}</th>' for name, style in zip(heads, styles, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td style="{s}">{_cell(v)}</td>' for v, s in zip(row, styles, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    return escape(_cut(str(value), LONGEST_CELL))


# -- both -------------------------------------------------------------------------------------------------------------


def _models(decoder: SpeculativeDecoder) -> list[dict[str, str]]:
    found = []
    for role, runner in decoder._runners().items():
        named = model_name(runner.model)
        facts = {"role": role, "model": str(named["name"] or named["class"]), "device": str(runner.device)}
        found.append({**facts, "dtype": str(runner.dtype).removeprefix("torch.")})
    return found


def _first(out: Generation) -> list[GenerationRow]:
    return [out[i] for i in range(min(len(out), MOST_ROWS))]


def _options(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in parameters.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
