"""Pages: readable in both schemes, one colour a strategy, and nothing wider than the window."""

from __future__ import annotations

import base64
import io
import re
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from specdec import SpeculativeDecoder
from specdec.research.ablation import merge, plots, report, run_ablation
from specdec.research.ablation.look import svg
from specdec.research.colours import (
    GROUNDS,
    LINES,
    STRATEGY_COLOURS,
    TARGET,
    TEXTS,
    colour_of,
    fill,
    marker_of,
    on_any_ground,
    page_style,
)
from specdec.research.traces import token_page
from specdec.research.traces.trace import record
from tests.helpers.browser import browser, find_chromium
from tests.helpers.contrast import contrast
from tests.helpers.grid import grid, save_pair

AA = 4.5
RESULTS = Path(__file__).resolve().parents[2] / "results"
XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
VISIONS = (
    np.eye(3),
    np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    np.array([[0.3673, 0.8607, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
)
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
        assert value == "transparent" or (named and named[1] in allowed), (prop, value)
    assert "opacity" not in css
    assert "#" not in css.replace("#panel", "")


def test_texts_never_stand_on_a_ground_that_is_not_tried() -> None:
    """The fill is only behind the page's own text."""
    assert re.findall(r"([^\n}]*) \{[^}]*var\(--fill", token_page.STYLE) == ["form span", ".t, .d"]
    assert "background: transparent" in re.findall(r"^\.d \{[^}]*", token_page.STYLE, re.MULTILINE)[0]


@pytest.mark.parametrize("name", plots.PLOTS)
def test_plots_have_no_ground_and_are_seen_on_white_and_on_dark_pages(name: str) -> None:
    made = svg(plots.PLOTS[name](RESULTS / ("context.parquet" if "context" in name else "figures.parquet")))
    assert "svg { color: #1c1e21; fill: #1c1e21; } @media (prefers-color-scheme: dark) { svg { color: #eceff2;" in made
    colours = set(re.findall(r"(?:fill|stroke): (#\w{6})", made)) - {"#1c1e21", "#eceff2"}
    grid = "#b0b0b0"
    assert colours - {grid}
    for colour in colours - {grid}:
        assert min(contrast(colour, ground) for ground in GROUNDS["ground"]) >= 3.0, colour
    assert "#000000" not in made
    assert "#ffffff" not in made
    assert re.search(r'<g id="patch_1">\s*<path d="[^"]*" style="fill: none"', made), "no ground of its own"


def seen(colour: str) -> list[np.ndarray]:
    """A colour in CIELAB as normal, red-blind and green-blind people see it (Machado, Oliveira & Fernandes 2009)."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    found = []
    for matrix in VISIONS:
        x, y, z = XYZ @ np.clip(matrix @ linear, 0, 1) / np.array([0.95047, 1, 1.08883])
        f, g, h = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
        found.append(np.array([116 * g - 16, 500 * (f - g), 200 * (g - h)]))
    return found


def distance(a: str, b: str) -> float:
    """The least distance of two colours to these three kinds of vision."""
    return min(float(np.linalg.norm(x - y)) for x, y in zip(seen(a), seen(b), strict=True))


def test_strategies_are_told_apart_by_every_kind_of_vision() -> None:
    most = ("draft-model", "prompt-lookup", "suffix", "ngram-mod", "eagle3")
    for a, b in combinations(STRATEGY_COLOURS, 2):
        apart = distance(STRATEGY_COLOURS[a], STRATEGY_COLOURS[b])
        assert apart > (25 if {a, b} <= set(most) else 10), (a, b, apart)
        assert apart > 20 or marker_of(a) != marker_of(b), (a, b, apart)
    for name, colour in STRATEGY_COLOURS.items():
        assert min(contrast(colour, ground) for ground in GROUNDS["ground"]) >= 3.0, name
    assert distance("#D62728", "#8C8C00") < 25 < np.linalg.norm(seen("#D62728")[0] - seen("#8C8C00")[0]), "a control"
    assert contrast("#F0E442", "#ffffff") < 1.4, "lookahead's yellow of before must fail"


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
            if file.name == "report.html":
                page.run("document.images[0].scrollIntoView()")
                assert page.run("[...document.images].every(i => i.complete && i.naturalWidth > 100)")
                shot = page.ask("Page.captureScreenshot")["data"]
                pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(shot))).convert("L"))
                # Ground is most of a plot, and its texts and frames are far from it.
                assert np.median(pixels) == (255 if scheme == "light" else pytest.approx(23, abs=1))
                assert pixels.min() < 40
                assert pixels.max() > 200
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
