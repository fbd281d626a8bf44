"""One colour a strategy, the same in the demo, on token pages and in plots.

Every colour has a contrast of at least 3 : 1 to a white page and to a dark one, so that one plot serves both. Colours
of any two strategies differ for every kind of vision, those of the five that are compared most differ much; markers
and dashes tell the rest apart, also in print. A strategy of one's own gets one of them by its name, so that it keeps it
from run to run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

STRATEGY_COLOURS = {
    "draft-model": "#9977EE", "prompt-lookup": "#CC6688", "suffix": "#227733", "ngram-mod": "#889911",
    "eagle3": "#994499", "ngram-simple": "#4499BB", "ngram-cache": "#118877", "ngram-map-k": "#995555",
    "ngram-map-k4v": "#8866FF", "early-exit": "#FF5500", "recycling": "#3366BB",
    "rest": "#1188BB", "lookahead": "#339955", "dflash": "#CC2222", "mtp": "#996699",
}  # fmt: skip
# Grounds and texts of pages, light and dark: every text has a contrast of at least 4.5 : 1 to every ground.
GROUNDS = {
    "ground": ("#ffffff", "#14171a"), "panel": ("#f3f4f6", "#22272e"), "good": ("#dafbe1", "#12361f"),
    "bad": ("#ffebe9", "#4a1518"), "warn": ("#fff8c5", "#3b3000"),
}  # fmt: skip
TEXTS = {
    "text": ("#1c1e21", "#eceff2"), "quiet": ("#4f5660", "#b4bcc6"), "rejected": ("#a40e26", "#ffb3ad"),
    "untested": ("#7a3b12", "#e8b98a"),
}  # fmt: skip
LINES = {"line": ("#d0d7de", "#444c56")}
FILLS = (0.62, 0.085)  # luminance of a strategy's fill behind text, in the light and the dark scheme
TARGET = "#888888"  # the target's own tokens, and plain decoding
MARKERS = "osD^vP*X<>hd"
LIGHTEST, DARKEST = 0.29, 0.135  # luminances of one strategy's settings: 3 : 1 and more to white and to a dark page
READABLE = 0.18  # luminance with a contrast of 4.5 : 1 to black and to white


def colour_of(strategy: str | None) -> str:
    """The colour of a strategy, #RRGGBB; None, "plain" and "target": the target's own."""
    if strategy in (None, "plain", "target"):
        return TARGET
    known = list(STRATEGY_COLOURS.values())
    number = int.from_bytes(hashlib.sha256(str(strategy).encode()).digest()[:4], "big")
    return STRATEGY_COLOURS.get(str(strategy)) or known[number % len(known)]


def marker_of(strategy: str | None) -> str:
    """A marker that goes with the colour, for prints without colours."""
    known = list(STRATEGY_COLOURS)
    return MARKERS[known.index(strategy) % len(MARKERS)] if strategy in STRATEGY_COLOURS else MARKERS[-1]


def looks(values: Sequence[str], strategies: bool) -> list[tuple[str, str]]:
    """Return a colour and a marker for each value: a strategy's own, or for values of other kinds by their order."""
    if strategies:
        return [(colour_of(v), marker_of(v)) for v in values]
    known = list(STRATEGY_COLOURS.values())
    return [(known[i % len(known)], MARKERS[i % len(MARKERS)]) for i in range(len(values))]


def tint(colour: str, share: float = 0.7) -> str:
    """The colour with a share of white (of black where it is negative)."""
    end = 255 if share >= 0 else 0
    return "#" + "".join(f"{round(c + (end - c) * abs(share)):02X}" for c in _channels(colour))


def on_any_ground(colour: str) -> str:
    """The colour as text that is readable on black and on white."""
    return with_luminance(colour, READABLE)


def with_luminance(colour: str, wanted: float) -> str:
    """The colour with as much white or black as gives it a luminance."""
    shares = [i / 200 for i in range(-200, 201)]
    return tint(colour, min(shares, key=lambda s: (abs(luminance(tint(colour, s)) - wanted), abs(s))))


def page_style(strategies: Sequence[str] = ()) -> str:
    """CSS variables of a page in its light and its dark scheme; `.s0`, `.s1`, ... are the strategies."""
    named = GROUNDS | TEXTS | LINES
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in named.items()) for i in (0, 1))
    fills = [[f".s{i} {{ --fill: {fill(name, dark)}; }}" for i, name in enumerate(strategies)] for dark in (0, 1)]
    lines = [f".s{i} {{ --own: {on_any_ground(colour_of(name))}; }}" for i, name in enumerate(strategies)]
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        + "\n".join([*lines, *fills[0]])
        + f"\n@media (prefers-color-scheme: dark) {{\n:root {{ {dark} }}\n"
        + "\n".join(fills[1])
        + "\n}\n"
    )


def fill(strategy: str, dark: bool | int = False) -> str:
    """The ground behind a strategy's tokens on a page."""
    return with_luminance(colour_of(strategy), FILLS[bool(dark)])


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [c / 255 for c in _channels(colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
