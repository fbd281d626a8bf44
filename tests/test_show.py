"""What a notebook shows of results and decoders, and how results are looked into."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specdec import Generation, SpeculativeDecoder, Stats
from specdec.decoding.result import COUNTS_OF_A_ROW
from specdec.decoding.show import MOST_ROWS
from specdec.stats import RoundRecord, Times
from tests.helpers.playing import quoting_ids, weaker
from tests.helpers.tiny import tiny_model

NASTY = "<script>x</script> & 'q'\n\"r\""


class Cells(HTMLParser):
    """The texts of a page's cells; notes every tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        if tag in ("td", "th", "p"):
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    model = tiny_model("llama")
    return SpeculativeDecoder(model, weaker(model), strategies=["prompt-lookup", "draft-model:n_max=3"], check=False)


@pytest.fixture(scope="module")
def out(decoder: SpeculativeDecoder) -> Generation:
    return decoder.generate([quoting_ids(9, 1), [1, 2, 3]], 16)


def result(texts: list[str] | None, rows: int, error: str | None = None) -> Generation:
    stats = Stats(rows=[[RoundRecord("a", 3, 1)]] * rows, emitted=[2] * rows, times=Times(total=0.5))
    reason = "length" if error is None else "error"
    return Generation([[5, 6]] * rows, texts, [reason] * rows, stats, {}, [error] * rows)


def test_a_result_is_a_data_frame_with_a_line_a_text(decoder: SpeculativeDecoder, out: Generation) -> None:
    pandas = pytest.importorskip("pandas")
    prompts = [quoting_ids(9, 1), [1, 2, 3]]
    two = decoder.generate(prompts, 6, num_return_sequences=2, temperature=1.0, output_logprobs=True)
    frame = two.to_pandas()
    assert frame.row.tolist() == [0, 1, 2, 3]
    assert frame.token_ids.tolist() == two.token_ids
    assert frame.tokens.tolist() == [len(ids) for ids in two.token_ids] == frame.generated_tokens.tolist()
    assert frame.accepted_tokens.sum() == two.stats.accepted_tokens
    assert frame.logprob.tolist() == pytest.approx([sum(values) for values in two.logprobs or []])
    assert frame.groupby("prompt_hash").row.apply(list).tolist() in ([[0, 1], [2, 3]], [[2, 3], [0, 1]])
    one = out.to_pandas()
    assert "logprob" not in one
    assert one.conditional_acceptance_rate[0] == out[0].stats.conditional_acceptance_rate
    stats = Stats(rows=[[RoundRecord(None, 0, 0)]] * 2, emitted=[1] * 2, times=Times(total=0.5))
    nothing = Generation([[5]] * 2, None, ["length"] * 2, stats, {}).to_pandas()
    assert nothing.draft_acceptance_rate.isna().all()
    assert pandas.api.types.is_float_dtype(nothing.draft_acceptance_rate)
    assert (nothing.text.isna().all(), set(nothing.finish_reason)) == (True, {"length"})
    page = (
        (Path(__file__).parents[1] / "docs/metrics.md")
        .read_text(encoding="utf-8")
        .partition("## Columns of a call's data frame")[2]
    )
    assert [name for name in frame if f"`{name}`" not in page] == list(COUNTS_OF_A_ROW[1:-1])


def test_a_result_is_its_rows(out: Generation) -> None:
    rows = list(out)
    assert [row.index for row in rows] == [0, 1]
    assert [row.token_ids for row in rows] == out.token_ids
    assert [row.finish_reason for row in rows] == out.finish_reasons
    assert [row.origins for row in rows] == out.origins
    assert [row.stats.to_dict() for row in rows] == [
        {k: v for k, v in entry.items() if k != "emitted_tokens"} for entry in out.stats.to_dict()["rows"]
    ]
    assert out[-1].token_ids == out.token_ids[1]
    assert out[0].text is None
    assert [row.index for row in out[:1]] == [0]
    assert [row.index for row in out[::-1]] == [1, 0]
    with pytest.raises(IndexError):
        out[2]


def test_the_repr_of_a_result_is_a_line_a_row(out: Generation) -> None:
    head, *rows = repr(out).splitlines()
    assert head.startswith("Generation: 2 rows, 32 tokens, ")
    assert f"{out.stats.tokens_per_round:.2f} per round" in head
    assert [row.strip().split(",")[0] for row in rows] == ["0: 16 tokens", "1: 16 tokens"]
    assert "length" in rows[0]
    long = repr(result(["x" * 1000 + "\n"] * 50, 50))
    assert len(long.splitlines()) == 1 + MOST_ROWS + 1
    assert max(map(len, long.splitlines())) < 150
    assert "30 more rows" in long
    assert "went wrong" in repr(result(None, 1, "went wrong"))
    assert "\n" not in repr(out[0])


def test_tables_escape_texts_and_have_no_colours(out: Generation, decoder: SpeculativeDecoder) -> None:
    shown = result([NASTY], 1, NASTY)
    page = Cells(shown._repr_html_())
    assert "script" not in page.tags
    assert NASTY in page.texts
    for html in (
        shown._repr_html_(),
        out._repr_html_(),
        out[0]._repr_html_(),
        out.stats._repr_html_(),
        decoder._repr_html_(),
    ):
        assert re.search(r"(?<![-a-z])(color|background|bgcolor|border)", html) is None
        assert set(Cells(html).tags) <= {"table", "thead", "tbody", "tr", "th", "td", "p"}


def test_tables_show_the_figures(out: Generation, decoder: SpeculativeDecoder) -> None:
    rows = Cells(out._repr_html_()).texts
    assert " ".join(map(str, out.token_ids[1])) in rows
    cells = Cells(out.stats._repr_html_()).texts
    assert {"all", "prompt-lookup", "draft-model", str(out.stats.rounds), str(out.stats.tested_tokens)} <= set(cells)
    assert f"{out.stats.draft_acceptance_rate:.2f}" in cells
    one = Cells(out[0]._repr_html_()).texts
    assert {"tokens per round", "accepted per tested", "accepted per drafted", "length"} < set(one)
    models = " ".join(Cells(decoder._repr_html_()).texts)
    for part in ("LlamaForCausalLM", "cpu", "float32", "prompt-lookup", "n_max=3"):
        assert part in models
    assert f"the first {MOST_ROWS} rows" in result(None, 50)._repr_html_()


def test_the_repr_of_a_decoder_names_its_parts(decoder: SpeculativeDecoder) -> None:
    model = "LlamaForCausalLM (cpu, float32)"
    expected = f"SpeculativeDecoder(target={model}, draft={model}, strategies=[prompt-lookup, draft-model])"
    assert repr(decoder) == expected


def test_tab_finds_the_pooled_figures(out: Generation) -> None:
    found = dir(out.stats)
    assert {"tokens_per_round", "draft_acceptance_rate", "tokens_per_second", "to_dict", "times"} <= set(found)
    for name in found:
        getattr(out.stats, name)


def test_tokens_per_second_is_of_the_whole_call(out: Generation) -> None:
    assert out.stats.tokens_per_second == 32 / out.stats.times.total
    assert Stats().tokens_per_second is None
    assert "per second" not in repr(Stats())
    assert repr(result(None, 1).stats) == (
        "Stats(1 row, 1 round, 2 tokens, 2.00 per round, 4.0 per second, "
        "0.50 accepted per tested, 0.33 accepted per drafted)"
    )
