"""The plots draw what the table says: every expected number here is worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from specdec import STRATEGIES, Results
from specdec.cli.output import colours
from specdec.errors import SpecdecError
from specdec.research.ablation import plots
from specdec.research.ablation.look import BESIDE, Look
from specdec.research.ablation.table import figures
from specdec.research.colours import GROUNDS, STRATEGY_COLOURS, colour_of, luminance, on_any_ground, tint
from specdec.research.facets import facets
from tests.helpers.contrast import contrast

# Rounds as (strategy, drafted, accepted). Every text has 12 tokens.
PLAIN = [(None, 0, 0)] * 12
K1 = [("draft-model", 1, 1)] * 4 + [("draft-model", 1, 0)] * 4
K2 = [("draft-model", 2, 2)] * 3 + [("draft-model", 2, 1), ("draft-model", 2, 0)]
BEATEN = [("prompt-lookup", 1, 1)] + [("prompt-lookup", 1, 0)] * 10


def row(setting: str, prompt: str, records: list[Any], draft: float = 0.0, verify: float = 1.0, **more: Any) -> Any:
    """One row; seconds of a drafted token and of a pass."""
    made = {
        "setting": setting, "prompt": prompt, "records": [list(r) for r in records], "cell": setting, "plain": "plain",
        "pair": "p", "status": "ok", "drafts": setting != "plain", "seed": 0, "batch_size": 1, "call": 0,
        "equals_plain": None, "lossy": False, "category": "c", "prompt_tokens": 10, "prefill_seconds": 1.0,
        "tokens": [0] * (len(records) + sum(r[2] for r in records)),
    }  # fmt: skip
    made.update(figures(made))
    made["draft_seconds"] = draft * made["draft_tokens"]
    made["verify_seconds"] = verify * made["rounds"]
    made["seconds"] = 1.0 + made["draft_seconds"] + made["verify_seconds"]
    return {**made, **more}


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    made = []
    for prompt in ("a", "b"):
        made += [
            row("plain", prompt, PLAIN),
            row("draft k=1", prompt, K1, 0.1, 1.0, k=1),
            row("draft k=2", prompt, K2, 0.1, 1.2, k=2),
            row("lookup", prompt, BEATEN, 0.0, 1.3, k=None),
        ]
    return made


def lines(figure: Any) -> dict[str, tuple[list[float], list[float]]]:
    """x and y of every named line with error bars."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    found = {}
    for handle, name in zip(handles, names, strict=True):
        line = handle.lines[0] if hasattr(handle, "lines") else None
        if line is not None:
            found[name] = ([float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()])
    return found


def test_acceptance_by_position_is_accepted_over_tested(rows: list[Any]) -> None:
    drawn = lines(plots.acceptance_by_position(rows))
    assert drawn["draft k=1"] == ([1.0 - BESIDE], [pytest.approx(4 / 8)])
    assert drawn["draft k=2"] == ([1.0, 2.0], [pytest.approx(4 / 5), pytest.approx(3 / 4)])
    assert drawn["lookup"] == ([1.0 + BESIDE], [pytest.approx(1 / 11)])


def test_the_histogram_has_the_shares_of_drafted_rounds(rows: list[Any]) -> None:
    axes = plots.accepted_length_histogram(rows).axes[0]
    heights = {c.get_label(): [bar.get_height() for bar in c] for c in axes.containers}
    assert heights == {
        "draft k=1": pytest.approx([0.5, 0.5]),
        "draft k=2": pytest.approx([0.2, 0.2, 0.6]),
        "lookup": pytest.approx([10 / 11, 1 / 11]),
    }


def test_speed_up_is_measured_without_prefill_and_theory_lies_beside_it(rows: list[Any]) -> None:
    figure = plots.speedup_against_k(rows)
    assert lines(figure) == {"draft": ([1.0, 2.0], [pytest.approx(12 / 8.8), pytest.approx(12 / 7.0)])}
    [theory] = [line for line in figure.axes[0].lines if line.get_linestyle() == ":" and len(line.get_xdata())]
    a, per_token = 7 / 9, 0.1 + 0.2 / 2  # of the middle k, which is 2
    expected = [(1 + a) / (1 + per_token), (1 + a + a**2) / (1 + 2 * per_token)]
    assert list(theory.get_xdata()) == [1, 2]
    assert list(theory.get_ydata()) == pytest.approx(expected)


def test_cost_and_gain_of_a_round_are_in_plain_passes(rows: list[Any]) -> None:
    axes = plots.cost_acceptance_pareto(rows).axes[0]
    places = {c.get_label(): tuple(c.get_offsets()[0]) for c in axes.collections}
    assert places == {
        "draft k=1": pytest.approx((1.1, 1.5)),
        "draft k=2": pytest.approx((1.4, 2.4)),
        "lookup": pytest.approx((1.3, 12 / 11)),
    }
    corners = {c.get_label(): len(c.get_paths()[0].vertices) for c in axes.collections}
    assert corners["draft k=1"] == corners["draft k=2"] != corners["lookup"], "only what is beaten is a circle"


def test_numbers_tell_many_settings_of_the_cost_plot_apart(rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(t.get_text() == "1" for t in plots.cost_acceptance_pareto(rows).axes[0].texts)
    monkeypatch.setattr(plots, "MOST_COLOURS", 2)
    axes = plots.cost_acceptance_pareto(rows).axes[0]
    numbers = {t.get_text() for t in axes.texts} & {"1", "2", "3"}
    assert {c.get_label().split()[0] for c in axes.collections} == numbers == {"1", "2", "3"}


def test_the_context_curve_bins_rounds_by_the_text_before_them() -> None:
    """Eight bins of equal counts, so two for each of four texts of thirty rounds."""
    right, wrong = ([("draft-model", 1, stood)] * 30 for stood in (1, 0))
    starts = {"a": (100, right), "b": (1000, wrong), "c": (3000, right), "d": (5000, wrong)}
    made = [row("draft", name, records, prompt_tokens=at) for name, (at, records) in starts.items()]
    x, y = lines(plots.context_curve(made))["draft"]
    assert y == [1, 1, 0, 0, 1, 1, 0, 0]
    # A round is one token further than the one before it, and two where a draft stood: the middles of fifteen each.
    assert x == pytest.approx([114, 144, 1007, 1022, 3014, 3044, 5007, 5022])


def test_the_strategy_share_follows_the_text() -> None:
    """A text whose first half one strategy drafted and whose second half another one did, one draft a round."""
    records = [("prompt-lookup", 1, 1)] * 12 + [("draft-model", 1, 1)] * 12
    axes = plots.strategy_share_over_time([row("chain", "a", records), row("plain", "a", PLAIN)]).axes[0]
    shares = {}
    for area in axes.collections:
        corners = area.get_paths()[0].vertices
        xs = sorted(set(corners[:, 0]))
        shares[area.get_label()] = [float(np.ptp(corners[corners[:, 0] == x, 1])) for x in xs]
    assert shares == {
        "prompt-lookup": pytest.approx([0.5] * 6 + [0.0] * 6),
        "draft-model": pytest.approx([0.0] * 6 + [0.5] * 6),
        "target": pytest.approx([0.5] * 12),
    }


# -- tables that do not have it ---------------------------------------------------------------------------------------


def said(plot: Any, table: Any) -> str:
    """The one line that a plot refuses a table with; it names the plot."""
    with pytest.raises(SpecdecError) as caught:
        plot(table)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{plot.__name__}: ")
    return str(caught.value)


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", sorted(plots.PLOTS))
def test_a_plot_names_each_column_that_its_table_lacks(rows: list[Any], name: str) -> None:
    """Without any one column a plot draws the same or names that column."""
    plot, needed, lines = plots.PLOTS[name], [], []
    for column in sorted(rows[0]):
        try:
            plot([{k: v for k, v in r.items() if k != column} for r in rows])
        except SpecdecError as error:
            needed.append(column)
            lines.append(str(error))
    assert lines == [f"{plot.__name__}: the results table lacks the columns {column}" for column in needed]
    assert {"setting", "status", "drafts", "prompt"} < set(needed)
    assert needed == sorted(said(plot, [{"k": 1}]).split("lacks the columns ")[1].split(", "))


@pytest.mark.parametrize("name", sorted(plots.PLOTS))
def test_a_plot_of_an_empty_or_failed_table_says_so(rows: list[Any], name: str, tmp_path: Path) -> None:
    plot = plots.PLOTS[name]
    assert "no rows" in said(plot, [])
    assert "no rows" in said(plot, pyarrow.table({"setting": []}))
    failed = [{**r, "status": "error", "error": "out of luck"} for r in rows]
    assert "every row" in said(plot, failed)
    assert "out of luck" in said(plot, failed)
    (tmp_path / "x.parquet").write_bytes(b"no table")
    assert "x.parquet" in said(plot, tmp_path / "x.parquet")
    assert "int" in said(plot, [1, 2])


def test_a_speed_up_needs_plain_rows_beside_it(rows: list[Any]) -> None:
    drafting = [r for r in rows if r["drafts"]]
    assert "plain rows" in said(plots.speedup_against_k, drafting)
    assert "plain rows" in said(plots.cost_acceptance_pareto, drafting)


def test_an_absurd_k_costs_no_more_than_another_one(rows: list[Any]) -> None:
    huge = [{**r, "k": 10**15} if r.get("k") == 2 else r for r in rows]
    figure = plots.speedup_against_k(huge)
    [theory] = [line for line in figure.axes[0].lines if line.get_linestyle() == ":" and len(line.get_xdata())]
    xs = list(theory.get_xdata())
    assert (len(xs), xs[0], xs[-1]) == (plots.THEORY_POINTS, 1, 10**15)
    assert "whole number" in said(plots.speedup_against_k, [{**r, "k": "many"} if r.get("k") else r for r in rows])


@pytest.mark.parametrize("ks", [(1, 2), (2,), (1, 2, 3), (2, 4, 16)])
def test_an_axis_of_whole_numbers_has_whole_ticks(ks: tuple[int, ...]) -> None:
    made = [row("plain", p, PLAIN) for p in ("a", "b")]
    made += [row(f"draft k={k}", p, [("draft-model", k, k % 2)] * 12, 0.1, k=k) for k in ks for p in ("a", "b")]
    for name in ("speedup_against_k", "acceptance_by_position", "accepted_length_histogram", "context_curve"):
        figure = getattr(plots, name)(made)
        figure.draw_without_rendering()
        shown = [t.get_text() for t in figure.axes[0].get_xticklabels()]
        assert shown, name
        assert not [text for text in shown if "." in text], name
    assert [t.get_text() for t in facets(made, x="k").axes[0].get_xticklabels()] == [str(k) for k in ks]


def test_many_settings_of_several_chains_get_a_panel_a_chain(rows: list[Any]) -> None:
    names, ks = ("prompt-lookup", "suffix", "ngram-mod", "draft-model"), (1, 2, 4, 8)
    many = [row("plain", "a", PLAIN, strategies="plain")]
    many += [row(f"{n} k={k}", "a", [(n, k, k // 2)] * 12, k=k, strategies=n) for n in names for k in ks]
    for name in ("acceptance_by_position", "accepted_length_histogram", "context_curve"):
        plot = getattr(plots, name)
        figure = plot(many)
        assert [a.get_title().split("\n")[0] for a in figure.axes] == [f"strategies = {n}" for n in names], name
        assert all(len(a.get_legend_handles_labels()[1]) == len(ks) for a in figure.axes), name
        assert len(plot(many, where={"k": [2, 4]}).axes) == len(plot(rows).axes) == 1, name
        assert plot(many, ax=figure.axes[0]) is figure, "axes of the caller's hold what they are given"


# -- tables, filters, panels, axes ------------------------------------------------------------------------------------


def test_a_plot_takes_results_and_a_filtered_data_frame_and_keeps_its_speed_ups(rows: list[Any]) -> None:
    pytest.importorskip("pandas")
    frame = Results.load(rows).to_pandas()
    whole = lines(plots.speedup_against_k(Results.load(rows)))
    assert lines(plots.speedup_against_k(frame[frame.drafts])) == whole
    assert plots.cost_acceptance_pareto(frame[frame.drafts & (frame.setting != "lookup")]).axes
    few = lines(plots.acceptance_by_position(rows, where={"k": [1]}))
    assert set(few) == {"draft k=1"} == set(lines(plots.acceptance_by_position(rows, where=lambda r: r["k"] == 1)))
    with pytest.raises(SpecdecError, match="acceptance_by_position: where: no row that drafts"):
        plots.acceptance_by_position(rows, where={"k": 77})


def test_all_settings_are_drawn_in_panels_and_into_given_axes(rows: list[Any], tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    named = [{**r, "strategies": r["setting"].split()[0]} for r in rows]
    many = [{**r, "setting": f"{r['setting']} {i}"} for i in range(10) for r in named]
    figure = plots.acceptance_by_position(many, panel="strategies")
    assert [a.get_title() for a in figure.axes] == [
        f"strategies = {s}\n2 prompts, 100% in loops" for s in ("draft", "lookup")
    ]
    drawn = [len(a.get_legend_handles_labels()[1]) for a in figure.axes]
    assert drawn == [20, 10]
    for place in figure.axes:  # beside each other, among those of the panel, and around the position
        at = sorted(h.lines[0].get_xdata()[0] for h in place.containers)
        assert len({round(x, 6) for x in at}) == len(at)
        assert (sum(at) / len(at), at[-1] - at[0]) == (pytest.approx(1), pytest.approx(0.5))
    mine = Figure()
    axes = mine.add_subplot()
    assert plots.accepted_length_histogram(rows, ax=axes) is mine
    assert axes.get_xlabel()
    axes.set_xticks([0, 5])  # as many a style does
    for plot in (plots.acceptance_by_position, plots.accepted_length_histogram):
        assert plot(rows, ax=axes) is mine
    for wrong in (mine, [axes], 3):
        with pytest.raises(SpecdecError, match="ax: expected axes"):
            plots.acceptance_by_position(rows, ax=wrong)
    for ending in ("svg", "pdf"):
        mine.savefig(tmp_path / f"a.{ending}")
        assert (tmp_path / f"a.{ending}").stat().st_size > 1000


def test_settings_of_a_strategy_are_told_apart_and_from_white(rows: list[Any]) -> None:
    for who in ("draft-model", "ngram-mod", "lookahead"):
        made = [row(f"k={k}", "a", [(who, 2, 1)]) for k in range(6)]
        shades = [luminance(Look(made).colour(f"k={k}")) for k in range(6)]
        assert shades == sorted(shades, reverse=True)
        assert min((a + 0.05) / (b + 0.05) for a, b in pairwise(shades)) > 1.1
        for ground in GROUNDS["ground"]:
            assert min(contrast(Look(made).colour(f"k={k}"), ground) for k in range(6)) >= 3.0
        assert len({str(Look(made).style(f"k={k}")["linestyle"]) for k in range(3)}) == 3, "dashes, for prints in grey"


def test_facets_draw_any_figure_against_any_axis(rows: list[Any]) -> None:
    both = [{**r, "category": c, "prompt": r["prompt"] + c} for c in ("x", "y") for r in rows]
    figure = facets(both, "draft_acceptance_rate", x="position", colour="strategy", panel="category")
    assert [a.get_title() for a in figure.axes] == [f"category = {c}\n2 prompts, 100% in loops" for c in "xy"]
    assert len({(a.get_xlim(), a.get_ylim()) for a in figure.axes}) == 1, "panels are on one scale"
    uneven = facets([r for r in both if r["category"] == "x" or r.get("k") == 1], panel="category")
    for axes in uneven.axes:  # no point on an edge, also of a panel with few
        drawn = [x for line in axes.lines for x in line.get_xdata()]
        assert axes.get_xlim()[0] < min(drawn) <= max(drawn) < axes.get_xlim()[1]
    few = facets([r for r in rows if r["prompt"] == "a"], x="position", colour="strategy")
    assert len(lines(few)["draft-model"][0]) == 1, "four tokens were tested at position 2"
    own = plots.acceptance_by_position([r for r in rows if r["prompt"] == "a"])
    for drawn, left_out in ((few, True), (own, True), (figure, False)):
        assert ("left out" in drawn.legends[0].get_title().get_text().replace("\n", " ")) is left_out
    x, y = lines(figure)["draft-model"]
    assert y == [pytest.approx((8 + 8) / (16 + 10)), pytest.approx(6 / 10)]
    assert x == [1 - BESIDE / 2, 2 - BESIDE / 2], "beside the other strategy's"
    [line] = [h.lines[0] for h in figure.axes[0].containers if h.get_label() == "draft-model"]
    assert line.get_color() == STRATEGY_COLOURS["draft-model"]
    with pytest.raises(SpecdecError, match="figure 'speed'"):
        facets(rows, "speed")


def test_facets_tell_values_apart_and_leave_out_what_is_on_no_axis(rows: list[Any]) -> None:
    many = [{**r, "k": t if r["drafts"] else None, "temperature": t} for t in (1, 2, 3, 4) for r in rows]
    axes = facets(many, "tokens_per_round", x="k", colour="temperature").axes[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "2", "3", "4"]  # plain decoding has no k
    drawn = [h.lines[0] for h in axes.containers]
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == len(drawn) == 4
    assert all(line.get_linestyle() == "-" for line in drawn)


ODD = [3, {"k": [1]}, ["k", "k"], object()]
CALLS = {
    "where": lambda r, v: plots.acceptance_by_position(r, where=v),
    "panel": lambda r, v: plots.acceptance_by_position(r, panel=v),
    "ax": lambda r, v: plots.acceptance_by_position(r, ax=v),
    "table": lambda r, v: plots.acceptance_by_position(v),
    "setting": lambda r, v: plots.strategy_share_over_time(r, v),
    **{name: lambda r, v, name=name: facets(r, **{name: v}) for name in ("figure", "x", "colour", "panel", "ax")},
    "facets": lambda r, v: facets(v),
    "load": lambda r, v: Results.load(v),
    "by": lambda r, v: Results.load(r).by(v),
    "column": lambda r, v: Results.load(r).where(k=v),
    "keep": lambda r, v: Results.load(r).where(v),
    "against": lambda r, v: Results.load(r).against(v),
    "figures": lambda r, v: Results.load(r).by().to_latex(figures=v),
    "digits": lambda r, v: Results.load(r).by().to_latex(digits=[v]),
    "path": lambda r, v: Results.load(r).to_csv([v]),
}


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_one_line(rows: list[Any], name: str) -> None:
    said = []
    for value in ODD:
        try:
            CALLS[name](rows, value)
        except SpecdecError as error:
            said.append(str(error))
    assert len(said) >= 2
    assert "\n" not in "".join(said)


# -- colours ----------------------------------------------------------------------------------------------------------


def test_every_strategy_has_one_colour_that_is_readable_everywhere() -> None:
    assert set(STRATEGY_COLOURS) == set(STRATEGIES), "each built-in strategy has its own"
    assert len(set(STRATEGY_COLOURS.values())) == len(STRATEGY_COLOURS)
    assert colours(["suffix"]) == {"suffix": on_any_ground(STRATEGY_COLOURS["suffix"])}
    assert colour_of("my:Own") == colour_of("my:Own")
    for colour in STRATEGY_COLOURS.values():
        text, ground = luminance(on_any_ground(colour)), luminance(tint(colour))
        assert min(1.05 / (text + 0.05), (text + 0.05) / 0.05) > 4.3
        assert (ground + 0.05) / (luminance("#1C1E21") + 0.05) > 7, "dark text on the page's tint"
