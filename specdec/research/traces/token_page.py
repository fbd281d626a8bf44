"""The token page: a trace as one HTML file in which every token shows where it came from.

Accepted drafts have their strategy's colour, the target's own tokens are plain, and rejected drafts are struck out at
the place where they were proposed. Hovering over a token, or reaching it with the keyboard, shows p, q, rank, expected
acceptance and the best tokens of p and q. The filters choose rows and strategies.

The file needs no network and allows none: its content policy permits the one script and the one style sheet in it, by
their hashes, so that text which escaped the escaping could still not run. Every text is data of an attribute or the
content of an element, never of the script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from specdec.decoding.result import Round
from specdec.research.colours import page_style
from specdec.research.traces.rounds import Piece, pieces_of

if TYPE_CHECKING:
    from specdec.research.traces.trace import Trace

STYLE = """
body { margin: 0; padding: 1rem 1.5rem 9rem; color: var(--text); background: var(--ground);
  font: 15px/1.6 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.25rem; margin: 0 0 .25rem; }
h2 { font-size: .95rem; margin: 1.25rem 0 .25rem; color: var(--quiet); }
.facts, form { color: var(--quiet); margin: .25rem 0; }
form label { margin-right: 1rem; display: inline-block; }
form select { max-width: 75vw; }
form span { color: var(--text); background: var(--fill); padding: 1px 4px; border-radius: 3px; }
form del { color: var(--rejected); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.9 ui-monospace, monospace; }
.prompt { color: var(--quiet); }
.t, .d { border-radius: 3px; padding: 1px 0; outline-offset: 1px; background: var(--fill, transparent); }
.t + .t { border-left: 1px solid var(--ground); }
.t:hover, .t:focus, .d:hover, .d:focus { outline: 2px solid var(--text); }
.d { text-decoration: line-through; color: var(--rejected); background: transparent; font-size: .85em; margin: 0 1px;
  border-bottom: 2px solid var(--own, transparent); border-radius: 0; }
.d.untested { color: var(--untested); border-bottom-style: dotted; }
.off { background: transparent; color: var(--quiet); border-color: transparent; }
.gone { display: none; }
#panel { position: fixed; left: 0; right: 0; bottom: 0; max-height: 8.5rem; overflow: auto; margin: 0;
  padding: .5rem 1.5rem; background: var(--panel); border-top: 1px solid var(--line); white-space: pre-wrap;
  font: 13px/1.5 ui-monospace, monospace; }
"""

# Titles work without a script; with it, their text moves to the panel, which also keyboards and screens reach.
SCRIPT = """
"use strict";
const panel = document.getElementById("panel");
const tokens = document.querySelectorAll(".t, .d");
for (const token of tokens) {
  token.dataset.about = token.title;
  token.removeAttribute("title");
}
function show(event) {
  const token = event.target.closest(".t, .d");
  if (token) panel.textContent = token.dataset.about;
}
document.addEventListener("mouseover", show);
document.addEventListener("focusin", show);
function filter() {
  const row = document.getElementById("row").value;
  for (const section of document.querySelectorAll("section"))
    section.classList.toggle("gone", row !== "" && section.dataset.row !== row);
  const rejected = document.getElementById("rejected").checked;
  const chosen = new Set();
  for (const box of document.querySelectorAll("input[name=strategy]")) if (box.checked) chosen.add(box.value);
  for (const token of tokens) {
    const on = chosen.has(token.dataset.by);
    token.classList.toggle("off", !on);
    if (token.classList.contains("d")) token.classList.toggle("gone", !on || !rejected);
  }
}
document.getElementById("filters").addEventListener("change", filter);
document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
"""

OWN = "-"  # the target in the strategies' filter


def page(trace: Trace, title: str) -> str:
    """The whole file."""
    style = page_style(trace.strategies) + STYLE
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(SCRIPT)}'; base-uri 'none'"
    body = "\n".join(_section(trace, i) for i in range(len(trace.rows)))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="facts">{escape(_facts(trace))}</p>\n{_filters(trace)}\n{body}\n'
        f'<pre id="panel">Hover over a token, or reach it with the Tab key.</pre>\n<script>{SCRIPT}</script>\n'
        "</body>\n</html>\n"
    )


def frame(trace: Trace) -> str:
    """The page inside a frame of its own, for notebooks: its style and script touch nothing around it."""
    return (
        f'<iframe sandbox="allow-scripts" width="100%" height="480" title="specdec trace" '
        f'srcdoc="{escape(page(trace, "specdec trace"))}"></iframe>'
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _facts(trace: Trace) -> str:
    stats, made = trace.stats, trace.provenance
    settings = made.get("settings", {})
    parts = [f"{len(trace.rows)} rows", f"{stats['emitted_tokens']} tokens", f"{stats['rounds']} rounds"]
    parts += [f"{stats['tokens_per_round'] or 0:.2f} tokens per round"]
    parts += [f"{name} {settings.get(name)}" for name in ("acceptance", "temperature")]
    parts += [f"seed {made.get('seed')}", f"specdec {made.get('versions', {}).get('specdec')}"]
    if made.get("lossy"):
        parts.append("LOSSY: the acceptance rule changes the distribution of the text")
    return " · ".join(parts)


def _filters(trace: Trace) -> str:
    boxes = [
        f'<label><input type="checkbox" name="strategy" value="{escape(name)}" checked> '
        f'<span class="s{i}">{escape(name)}</span></label>'
        for i, name in enumerate(trace.strategies)
    ]
    boxes.append(f'<label><input type="checkbox" name="strategy" value="{OWN}" checked> the target itself</label>')
    boxes.append('<label><input type="checkbox" id="rejected" checked> <del>rejected</del>, dotted: not tested</label>')
    options = "".join(f'<option value="{i}">{i} {escape(row.id)}</option>' for i, row in enumerate(trace.rows))
    rows = f'<label>row <select id="row"><option value="">all</option>{options}</select></label>'
    return f'<form id="filters">{rows} {"".join(boxes)}</form>'


def _section(trace: Trace, index: int) -> str:
    row = trace.rows[index]
    named = {"row": str(index), "prompt": row.id, "category": row.category, "ended by": row.finish_reason}
    about = " · ".join(f"{name} {value}" for name, value in named.items() if value)
    prompt = row.prompt_text or " ".join(trace.text_of(t) for t in row.prompt)
    spans = "".join(_spans(trace, index))
    return (
        f'<section data-row="{index}"><h2>{escape(about)}</h2>'
        f'<div class="text"><span class="prompt">{escape(prompt)}</span>{spans}</div></section>'
    )


def _spans(trace: Trace, index: int) -> Iterator[str]:
    """The row's tokens, rejected drafts in front of the token that took their place."""
    colour = {name: i for i, name in enumerate(trace.strategies)}
    for piece in pieces_of(trace, index):
        r, node = piece.round, piece.node
        if node is None:
            yield _span("span", "t", OWN, _about_own(trace, r, piece.place), piece.text)
            continue
        by, kind = escape(r.strategy or ""), "" if r.strategy is None else f"s{colour[r.strategy]}"
        about = _about(trace, piece)
        if node.accepted:
            yield _span("span", f"t {kind}", by, about, piece.text)
        else:
            yield _span("del", f"d {kind}" if node.tested else f"d untested {kind}", by, about, piece.text)


def _span(tag: str, kind: str, by: str, about: str, text: str) -> str:
    line_end = "⏎\n" if tag == "span" else "⏎"  # what was rejected breaks no line
    shown = escape(text).replace("\n", line_end) or "·"
    return f'<{tag} class="{kind}" data-by="{by}" tabindex="0" title="{escape(about)}">{shown}</{tag}>'


def _about(trace: Trace, piece: Piece) -> str:
    """What the page says of a drafted token."""
    r, node, d = piece.round, piece.node, piece.round.details
    assert node is not None
    token, i = r.draft[node.index], node.index
    place = f"draft position {piece.before + node.depth}" + (f", node {i}" if r.parents is not None else "")
    verdict = "accepted" if node.accepted else "rejected" if node.tested else "after a rejected token: not tested"
    lines = [f"{trace.text_of(token)!r} (id {token}), proposed by {r.strategy}, {place}: {verdict}"]
    numbers = [f"p {r.p[i]:.4g}" + ("" if d is None else f" (rank {d.rank[i]})")]
    if r.q is not None:
        numbers.append(f"q {r.q[i]:.4g}")
    if d is None:
        return "\n".join([*lines, ", ".join(numbers)])
    if d.tv is not None:
        numbers.append(f"TV(p, q) {d.tv[i]:.3f}")
    if d.expected[i] is not None:
        numbers.append(f"expected acceptance {d.expected[i]:.3f}")
    lines += [", ".join(numbers), *_target_best(trace, r, node.parent + 1)]
    if d.draft_top_ids is not None and d.draft_top is not None:
        lines.append(f"draft's best: {_best(trace, d.draft_top_ids[i], d.draft_top[i])}")
    return "\n".join(lines)


def _about_own(trace: Trace, r: Round, j: int) -> str:
    """What the page says of the target's own token."""
    token = r.tokens[j]
    why = "no draft"
    if r.draft:
        why = "after the whole draft" if r.accepted == len(r.draft) else "in place of the rejected draft"
    lines = [f"{trace.text_of(token)!r} (id {token}), the target's own: {why}"]
    d = r.details
    if d is not None:
        lines.append(f"p {d.emitted_p[j]:.4g} (rank {d.emitted_rank[j]})")
        lines += _target_best(trace, r, d.emitted_column[j])
    return "\n".join(lines)


def _target_best(trace: Trace, r: Round, column: int) -> list[str]:
    """The best tokens of p at a column, if they were recorded."""
    d = r.details
    if d is None or column >= len(d.entropy):
        return []
    best = _best(trace, d.top_ids[column], d.top[column])
    return [f"entropy of p {d.entropy[column]:.3f} nats; target's best: {best}"]


def _best(trace: Trace, ids: Sequence[int], values: Sequence[Any]) -> str:
    return ", ".join(f"{trace.text_of(t)!r} {v:.3g}" for t, v in zip(ids, values, strict=True))
