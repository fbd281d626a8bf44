"""Pages: readable in both schemes, one colour a strategy, and nothing wider than the window."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from specdec import SpeculativeDecoder
from specdec.research.ablation import merge, report, run_ablation
from specdec.research.colours import (
    GROUNDS,
    LINES,
    STRATEGY_COLOURS,
    TARGET,
    TEXTS,
    colour_of,
    contrast,
    fill,
    on_any_ground,
    page_style,
)
from specdec.research.traces import token_page
from specdec.research.traces.trace import record
from tests.helpers.browser import browser, find_chromium
from tests.helpers.grid import grid, save_pair

AA = 4.5
STYLES = {"report": report.STYLE, "token page": token_page.STYLE}


def variables(css: str) -> list[dict[str, str]]:
    """The variables of both schemes, as the page has them."""
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    return [dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in (light, dark)]


def test_contrast_is_wcags() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)  # the textbook case that just fails


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_text_is_readable_on_every_ground(scheme: int) -> None:
    found = variables(page_style(list(STRATEGY_COLOURS)))[scheme]
    assert {n: found[n] for n in (*GROUNDS, *TEXTS)} == {n: p[scheme] for n, p in (GROUNDS | TEXTS).items()}
    for text, ground in product(TEXTS, GROUNDS):
        assert contrast(found[text], found[ground]) >= AA, (text, ground)
    for name in (*STRATEGY_COLOURS, "my_module:Mine", "plain"):
        assert contrast(found["text"], fill(name, scheme)) >= AA, name
        assert contrast(fill(name, scheme), found["ground"]) >= 1.3, name  # it can be seen
        assert contrast(on_any_ground(colour_of(name)), found["ground"]) >= 3.0, name  # a mark, no text
    assert contrast("#888888", "#ffffff") < AA, "the old prompt's grey must fail"


@pytest.mark.parametrize("name", STYLES)
def test_pages_have_no_colour_of_their_own_and_none_fades(name: str) -> None:
    css = STYLES[name]
    used = set(re.findall(r"var\(--([\w-]+)", css))
    assert used <= {*GROUNDS, *TEXTS, *LINES, "fill", "own"}
    for prop, value in re.findall(r"(?:^|[{;\s])(color|background): ([^;}]+)", css):
        allowed = TEXTS if prop == "color" else {**GROUNDS, "fill": None}
        named = re.match(r"var\(--([\w-]+)", value)
        assert value in ("transparent", "white") or (named and named[1] in allowed), (prop, value)
    assert "opacity" not in css
    assert "#" not in css.replace("#panel", "")


def test_texts_never_stand_on_a_ground_that_is_not_tried() -> None:
    """The fill is only behind the page's own text, and white only behind images."""
    assert re.findall(r"([^\n}]*) \{[^}]*var\(--fill", token_page.STYLE) == ["form span", ".t, .d"]
    assert "background: transparent" in re.findall(r"^\.d \{[^}]*", token_page.STYLE, re.MULTILINE)[0]
    assert re.findall(r"^(\w+) \{[^}]*white;", report.STYLE, re.MULTILINE) == ["img"]


CHROMIUM = find_chromium()


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install one, or name it in SPECDEC_CHROMIUM")
@pytest.mark.parametrize("width", [500, 1400])
def test_in_a_browser_nothing_is_wider_than_the_window_in_either_scheme(width: int, tmp_path: Path) -> None:
    pair = save_pair(tmp_path)
    config = grid(pair, prompts=("a" * 300, "b = 1\n", "c"), axes={"k": [1, 3], "temperature": [0.0, 0.7]}, strategies={
        "draft": ["draft-model"], "a-long-name-of-a-chain": ["prompt-lookup:ngram_min=1"]})  # fmt: skip
    run_ablation(config, tmp_path / "out")
    merge(tmp_path / "out")
    decoder = SpeculativeDecoder.from_pretrained(pair["target"], pair["draft"])
    record(decoder, ["x" * 200, "def f():"], 12, ids=["humaneval/35", "y" * 80]).to_html(tmp_path / "trace.html")
    with browser(str(CHROMIUM), tmp_path / "profile") as page:
        page.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        grounds = set()
        for scheme, file in product(("light", "dark"), (tmp_path / "out" / "report.html", tmp_path / "trace.html")):
            page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            page.open(file)
            assert page.run("document.documentElement.scrollWidth <= innerWidth"), (scheme, file.name)
            grounds.add((scheme, page.run("getComputedStyle(document.body).backgroundColor")))
            # The labels of a plot, 9 points in a figure of 5 inches, have 11 pixels or more.
            assert page.run("[...document.images].every(i => i.clientWidth * 9 / 72 / 5 >= 11)"), (scheme, file.name)
            if width == 1400:  # no column is cut
                assert page.run("[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)")
        assert grounds == {("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 26)")}


def test_a_strategy_has_one_colour_in_every_place() -> None:
    assert len(set(STRATEGY_COLOURS.values())) == len(STRATEGY_COLOURS)
    found = variables(page_style(["suffix"]))
    assert (found[0]["fill"], found[1]["fill"]) == (fill("suffix"), fill("suffix", True))
    assert found[0]["own"] == on_any_ground(STRATEGY_COLOURS["suffix"])
    assert colour_of("plain") == colour_of(None) == TARGET
