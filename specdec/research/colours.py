"""One colour a strategy, the same in the demo, on token pages and in plots.

The colours are Paul Tol's scheme "muted" (https://sronpersonalpages.nl/~pault/), whose nine colours are told apart with
every kind of colour blindness, and five of Okabe and Ito's. A strategy of one's own gets one of them by its name, so
that it keeps it from run to run.
"""

from __future__ import annotations

import hashlib

STRATEGY_COLOURS = {
    "draft-model": "#332288", "prompt-lookup": "#CC6677", "suffix": "#117733", "ngram-mod": "#DDCC77",
    "eagle3": "#882255", "ngram-simple": "#88CCEE", "ngram-cache": "#44AA99", "ngram-map-k": "#999933",
    "ngram-map-k4v": "#AA4499", "early-exit": "#D55E00", "recycling": "#0072B2",
    "rest": "#56B4E9", "lookahead": "#F0E442",
}  # fmt: skip
TARGET = "#888888"  # the target's own tokens, and plain decoding
MARKERS = "osD^vP*X<>hd"
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


def tint(colour: str, share: float = 0.7) -> str:
    """The colour with a share of white (of black where it is negative)."""
    end = 255 if share >= 0 else 0
    return _hex([round(c + (end - c) * abs(share)) for c in _channels(colour)])


def on_any_ground(colour: str) -> str:
    """The colour as text that is readable on black and on white."""
    shares = [i / 50 for i in range(-50, 51)]
    return tint(colour, min(shares, key=lambda s: (abs(luminance(tint(colour, s)) - READABLE), abs(s))))


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [c / 255 for c in _channels(colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _hex(channels: list[int]) -> str:
    return "#" + "".join(f"{c:02X}" for c in channels)
