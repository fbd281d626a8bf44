"""Texts that repeat themselves: found, counted, marked everywhere, and left out where asked."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specdec import Results
from specdec.cli import app, output
from specdec.errors import SpecdecError
from specdec.research.ablation import plots
from specdec.research.ablation.summary import summarise
from specdec.research.ablation.tables import loop_warning, settings_table
from specdec.research.demo import DEMO, load_decoder
from specdec.research.facets import facets
from specdec.research.loops import LEAST_PERIODS, LEAST_TOKENS, LOOPED, loop_share, loop_tokens
from tests.research.test_plots import BEATEN, PLAIN, row


def oracle(tokens: list[int]) -> int:
    """Every tail and every period tried, straight from the definition."""
    longest = 0
    for ids in (tokens, tokens[:-1]):
        for n in range(LEAST_TOKENS, len(ids) + 1):
            tail = ids[len(ids) - n :]
            periods = range(1, n // LEAST_PERIODS + 1)
            if any(all(tail[i] == tail[i - p] for i in range(p, n)) for p in periods):
                longest = max(longest, n)
    return longest


@pytest.mark.parametrize("seed", range(3))
def test_loops_are_the_definitions(seed: int) -> None:
    draw, found = random.Random(seed), set()
    for _ in range(60):
        head = [draw.randrange(3) for _ in range(draw.randrange(12))]
        period = [draw.randrange(3) for _ in range(draw.randrange(1, 6))]
        tokens = head + period * draw.randrange(6) + period[: draw.randrange(len(period))] + [9] * draw.randrange(2)
        assert loop_tokens(tokens) == oracle(tokens), tokens
        found.add(loop_tokens(tokens) > 0)
    assert found == {True, False}


def test_a_few_cases_by_hand() -> None:
    assert loop_tokens([]) == loop_tokens([7] * 7) == loop_tokens(list(range(40))) == 0
    assert loop_tokens([1, 2, 3, *[7] * 8]) == 8
    assert loop_tokens([5, *[1, 2, 3, 4] * 3, 0]) == 12  # an end token after it
    assert loop_tokens([*[1, 2] * 20, 8, 9]) == 0  # it came out again
    assert loop_share([[7] * 8, list(range(8))]) == 0.5


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    """Prompt a has a text, b a loop; prompt-lookup is right everywhere in the loop."""
    made = []
    right = [("prompt-lookup", 1, 1)] * 6
    for prompt, tokens, records in (("a", list(range(12)), BEATEN), ("b", [7] * 12, right)):
        made.append(row("plain", prompt, PLAIN, tokens=tokens))
        made.append(row("lookup", prompt, records, tokens=tokens))
    for r in made:
        r["loop_tokens"], r["emitted_tokens"] = loop_tokens(r["tokens"]), 12
        r["loop_share"] = r["loop_tokens"] / 12
    return made


def test_figures_say_what_is_in_loops_and_what_they_are_without(rows: list[Any]) -> None:
    entry = summarise(rows)["settings"]["lookup"]
    assert entry["loop_share"]["value"] == 0.5 > LOOPED
    assert (entry["looped_rows"], entry["rows"]) == (1, 2)
    [straight] = [r for r in rows if r["setting"] == "lookup" and r["prompt"] == "a"]
    alone = straight["accepted_tokens"] / straight["tested_tokens"]
    assert entry["without_loops"]["conditional_acceptance_rate"]["value"] == pytest.approx(alone)
    assert entry["conditional_acceptance_rate"]["value"] > alone
    dropped = summarise(rows, drop_loops=True)
    assert dropped["settings"]["lookup"]["conditional_acceptance_rate"]["value"] == pytest.approx(alone)
    assert (dropped["dropped_loops"], dropped["rows"]) == (2, 4)
    again = Results.load(rows).without_loops().by("setting")
    assert again.flat()[1]["conditional_acceptance_rate"] == pytest.approx(alone)


def test_every_table_and_plot_marks_loops_and_only_them(rows: list[Any]) -> None:
    summary = summarise(rows)
    assert "in loops" in settings_table(summary).heads
    assert "2 of 4 texts are loops" in str(loop_warning(summary))
    assert "2 rows whose texts are loops are left out" in str(loop_warning(summarise(rows, drop_loops=True)))
    assert "in loops" in Results.load(rows).by("strategy").text_table().heads
    for figure in (plots.acceptance_by_position(rows), facets(rows, colour="strategy"), facets(rows, colour="setting")):
        assert "50% in loops" in figure.legends[0].get_title().get_text(), "once where all are alike"
    mixed = [{**r, "setting": f"{r['setting']} {r['prompt']}"} for r in rows]
    said = [t.get_text() for t in plots.acceptance_by_position(mixed).legends[0].get_texts()]
    assert said == ["lookup a", "lookup b (100% in loops)"]
    panels = plots.acceptance_by_position(rows, panel="prompt")
    assert [a.get_title() for a in panels.axes] == ["prompt = a\n1 prompt", "prompt = b\n1 prompt, 100% in loops"]
    assert "in loops" not in str(panels.legends[0].get_title().get_text()), "no share of all panels"
    straight = [r for r in rows if r["prompt"] == "a"]
    assert loop_warning(summarise(straight)) is None
    assert "in loops" not in settings_table(summarise(straight)).heads
    assert "in loops" not in Results.load(straight).by("strategy").text_table().heads
    with pytest.raises(SpecdecError, match="every text"):
        summarise([r for r in rows if r["prompt"] == "b"], drop_loops=True)


def test_demo_and_generate_say_it_below_the_text() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    output.print_loops(console, [[7] * 8, list(range(8))])
    assert console.export_text().startswith("50% of the tokens are in loops")
    output.print_loops(console, [list(range(8))])
    assert console.export_text() == ""


@pytest.mark.full
def test_compare_marks_loops_and_drops_them() -> None:
    prompts = ["--prompt", "import unittest\n", "--prompt", DEMO.prompts[1]]
    call = ["compare", "--target", "demo-target", "--draft", "demo-draft", "--strategy", "suffix", *prompts]
    marked = CliRunner().invoke(app, [*call, "--max-new-tokens", "48"])
    assert marked.exit_code == 0, marked.output
    assert "in loops" in marked.stdout
    assert "2 of 4 texts are loops" in " ".join(marked.stdout.split())
    dropped = json.loads(CliRunner().invoke(app, [*call, "--max-new-tokens", "48", "--drop-loops", "--json"]).stdout)
    assert dropped["dropped_loops"] == 4  # plain decoding's of both pairs included
    assert [c["looped_rows"] for c in dropped["candidates"]] == [0, 0]
    assert [c["prompts"] for c in dropped["candidates"]] == [1, 1]
    assert dropped["gate"]["compared"] == 4


@pytest.mark.full
def test_the_demos_texts_do_not_loop() -> None:
    decoder = load_decoder(DEMO)
    assert loop_share(decoder.generate(list(DEMO.prompts), **DEMO.generation).token_ids) == 0.0
