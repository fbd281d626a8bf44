"""The token page: every token with its origin, any text as text, one file without a network."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec import SpecdecError
from specdec.research.traces import token_page
from specdec.research.traces.trace import Trace, record
from tests.helpers.browser import browser, find_chromium
from tests.helpers.playing import looping, weaker
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level

HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp; ]]> <!-- </style>"
CHROMIUM = find_chromium()


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Three rows: a prompt of HTML, whose tokens are HTML as well; a chain; a tree."""
    tokenizer = byte_level()
    target = looping(tiny_model("llama", 5, 320))
    decoder = specdec.SpeculativeDecoder(target, weaker(target, 0.3), tokenizer, check=False)
    options: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 12, "ignore_eos": True}
    made = record(
        decoder, [HOSTILE, "the quick brown fox"], strategies=["prompt-lookup:ngram_min=1", "draft-model:n_max=5"],
        ids=[HOSTILE, "b"], categories=["<b>x", ""], **options,
    )  # fmt: skip
    tree = record(decoder, "the lazy dog", strategies=[specdec.DraftModel(tree="2x2")], **options)
    rounds = [*made.rounds, *(replace(r, row=2, strategy="<i>draft'\"") for r in tree.rounds)]
    hostile = replace(made.rows[0], pieces=[HOSTILE] * len(made.rows[0].output))
    texts = dict.fromkeys({**made.tokens, **tree.tokens}, HOSTILE)
    return replace(made, rows=[hostile, made.rows[1], tree.rows[0]], rounds=rounds, tokens=texts)


class Reader(HTMLParser):
    """What a browser would make of the page: elements with their attributes and their text."""

    VOID = ("meta", "input", "img", "br")

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, {k: v or "" for k, v in attrs}, list[str]())
        self.elements.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def all(self, tag: str, kind: str | None = None) -> list[tuple[dict[str, str], str]]:
        found = [(a, "".join(text)) for t, a, text in self.elements if t == tag]
        return [(a, text) for a, text in found if kind is None or kind in a.get("class", "").split()]


def faults(html: str) -> list[str]:
    """What would let text act: elements, attributes or addresses that the page has no use for."""
    try:
        page = Reader(html)
    except AssertionError as error:
        return [str(error)]
    found = [f"{n} elements {tag}" for tag in ("script", "style", "form") if (n := len(page.all(tag))) != 1]
    found += [tag for tag, _, _ in page.elements if tag in ("img", "iframe", "link", "a", "object", "b", "i")]
    return found + [k for _, a, _ in page.elements for k in a if k.startswith("on") or k in ("src", "href", "style")]


def test_html_in_prompts_names_and_tokens_stays_text(trace: Trace) -> None:
    html = trace.to_html(title=HOSTILE)
    assert faults(html) == []
    page = Reader(html)
    assert [text for _, text in page.all("span", "prompt")] == [row.prompt_text for row in trace.rows]
    assert page.all("title")[0][1] == page.all("h1")[0][1] == HOSTILE
    assert page.all("h2")[0][1].startswith(f"row 0 · prompt {HOSTILE} · category <b>x")


def test_the_check_for_html_rejects_a_page_that_does_not_escape(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_page, "escape", lambda text: text)
    assert faults(trace.to_html()) != []


def test_every_token_is_there_once_with_its_origin(trace: Trace) -> None:
    page = Reader(trace.to_html())
    shown = [(a["data-by"], text.replace("⏎", "").replace("·", "")) for a, text in page.all("span", "t")]
    wanted = []
    for index, row in enumerate(trace.rows):
        by = [r.strategy if j < r.accepted else "-" for r in trace.of_row(index) for j in range(len(r.tokens))]
        wanted += list(zip(by, row.pieces, strict=True))
    assert shown == wanted
    assert {"draft-model", "prompt-lookup", "-", "<i>draft'\""} >= {by for by, _ in shown} > {"-"}


def test_rejected_drafts_are_struck_out_and_untested_ones_marked(trace: Trace) -> None:
    page = Reader(trace.to_html())
    struck = page.all("del", "d")
    assert len(struck) == sum(len(r.draft) - r.accepted for r in trace.rounds)
    untested = page.all("del", "untested")
    chains = [r for r in trace.rounds if r.parents is None]
    behind = sum(max(0, len(r.draft) - r.accepted - 1) for r in chains)
    assert len([a for a, _ in untested if a["data-by"] in ("draft-model", "prompt-lookup")]) == behind
    assert all("not tested" in a["title"] for a, _ in untested)
    assert sum("rejected" in a["title"].split("\n")[0] for a, _ in struck) == len(struck)


def test_a_token_tells_its_numbers(trace: Trace) -> None:
    r = next(r for r in trace.of_row(1) if r.accepted and r.q is not None)
    assert r.details is not None
    assert r.details.tv is not None
    titles = [a["title"] for a, _ in Reader(trace.to_html()).all("span", "t")]
    numbers = f"p {r.p[0]:.4g} (rank {r.details.rank[0]}), q {r.q[0]:.4g}, TV(p, q) {r.details.tv[0]:.3f}"
    assert any(numbers in title for title in titles)
    assert all("target's best" in title for title in titles)


def test_the_policy_allows_the_one_script_and_style_by_hash_and_no_network(trace: Trace) -> None:
    page = Reader(trace.to_html())
    [policy] = [a["content"] for a, _ in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    for tag in ("script", "style"):
        digest = hashlib.sha256(page.all(tag)[0][1].encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(trace: Trace) -> None:
    frame = Reader(trace._repr_html_())
    [(attributes, _)] = frame.all("iframe")
    assert attributes["srcdoc"] == trace.to_html()
    assert attributes["sandbox"] == "allow-scripts"
    assert len(frame.elements) == 1


def test_a_page_that_cannot_be_written_is_one_line(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match="cannot be written"):
        trace.to_html(tmp_path / "missing" / "page.html")


def test_a_trace_without_tokenizer_or_details_has_a_page(trace: Trace) -> None:
    bare = replace(
        trace, tokens={}, rows=[replace(r, pieces=[], prompt_text="") for r in trace.rows],
        rounds=[replace(r, details=None) for r in trace.rounds],
    )  # fmt: skip
    page = Reader(bare.to_html())
    assert next(text for _, text in page.all("span", "t")) == f"<{trace.rows[0].output[0]}>"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install one, or name it in SPECDEC_CHROMIUM")
def test_in_a_browser_filters_and_details_work_and_nothing_is_fetched(trace: Trace, tmp_path: Path) -> None:
    trace.to_html(tmp_path / "page.html")
    with browser(str(CHROMIUM), tmp_path / "profile") as page:
        page.open(tmp_path / "page.html")
        assert page.requests == [(tmp_path / "page.html").resolve().as_uri()]
        assert page.errors == []
        prompt = "document.querySelector('.prompt').textContent"
        assert page.run(prompt) == HOSTILE
        assert page.run("document.scripts.length") == 1
        count = "[...document.querySelectorAll('{}')].filter(e => e.offsetParent !== null).length"
        tokens = sum(len(row.output) for row in trace.rows)
        assert page.run(count.format(".t")) == tokens
        page.run("document.querySelector('.t').dispatchEvent(new Event('focusin', {bubbles: true}))")
        assert "target's best" in page.run("document.getElementById('panel').textContent")
        change = "dispatchEvent(new Event('change', {bubbles: true}))"
        page.run(f"document.getElementById('row').value = '1'; document.getElementById('row').{change}")
        assert page.run(count.format(".t")) == len(trace.rows[1].output)
        page.run(f"document.getElementById('rejected').checked = false; document.getElementById('rejected').{change}")
        assert page.run(count.format(".d")) == 0
        box = "document.querySelector('input[value=draft-model]')"
        page.run(f"{box}.checked = false; {box}.{change}")
        off = "[...document.querySelectorAll('.t.off')].every(e => e.dataset.by === 'draft-model')"
        assert page.run(off)
        assert page.run("document.querySelectorAll('.t.off').length") == sum(
            r.accepted for r in trace.rounds if r.strategy == "draft-model"
        )
