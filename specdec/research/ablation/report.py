"""The report: one HTML file that opens from disk. No script, no network, every text escaped.

A content security policy forbids everything but inline styles and images inside the file, so that not even a mistake
here could fetch something.
"""

from __future__ import annotations

import base64
import html
import io
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from specdec.errors import SpecdecError
from specdec.research.ablation.table import Row

SHOWN_TEXT = 400  # characters of a prompt's end and of an output
SHOWN_DIFFERENCES, SHOWN_ROWS, SHOWN_SETTINGS = 20, 8, 12
EVERY_ROW_FAILED = "Every row failed: there are no figures and no plots"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #1b1f24; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #d0d7de; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: 4px 10px; border-bottom: 1px solid #d8dee4; }
th { text-align: right; background: #f6f8fa; } td { text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; } td.text { white-space: normal; }
.scroll { overflow-x: auto; } .range { color: #656d76; font-size: 11px; }
.banner { padding: .6em 1em; border-radius: 6px; font-weight: 600; }
.good { background: #dafbe1; } .bad { background: #ffebe9; color: #a40e26; } .warn { background: #fff8c5; }
pre { background: #f6f8fa; padding: .8em; overflow-x: auto; white-space: pre-wrap; font-size: 12px; }
img { max-width: 100%; } figure { margin: 1em 0; } figcaption { font-weight: 600; }
"""


def render(manifest: Mapping[str, Any], rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    """The whole page."""
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        f"<title>specdec ablation</title><style>{STYLE}</style></head><body>"
    )
    config = yaml.safe_dump(manifest["config"], sort_keys=False, allow_unicode=True)
    parts = [
        head, "<h1>Ablation</h1>", _made_with(manifest, summary), _banners(summary), "<h2>Settings</h2>",
        _settings_table(summary), "<h2>Paired comparisons</h2>", _comparison_table(summary),
        "<h2>By category</h2>", _category_table(summary), "<h2>Plots</h2>", *_plots(rows),
        *_differences(manifest, rows), *_errors(summary), "<h2>Rows</h2>", _examples(manifest, rows),
        "<h2>Config</h2>", f"<pre>{text(config)}</pre>",
        "</body></html>\n",
    ]  # fmt: skip
    return "\n".join(parts)


def text(value: Any) -> str:
    """Anything as text of the page; control characters and halves of characters, which it cannot hold, as U+FFFD."""
    shown = html.escape(str(value), quote=True)
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\ufffd" for c in shown)


def interval(entry: Mapping[str, Any] | None, form: str = ".2f") -> str:
    """A figure with its interval, as HTML; `-` where there is none."""
    if entry is None or entry["value"] is None:
        return "-"
    value = format(entry["value"], form)
    if entry["low"] is None:
        return value
    return f'{value} <span class="range">{entry["low"]:{form}} to {entry["high"]:{form}}</span>'


def _made_with(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    versions, machine, runner = manifest["versions"], manifest["machine"], summary["runner"]
    lines = [
        f"{summary['rows']:,} rows of {len(manifest['cells']):,} cells and {len(manifest['prompts']):,} prompts; "
        f"{manifest['date']}, specdec {versions['specdec']} at commit {manifest['commit']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}; {machine['gpu'] or machine['processor']}, {machine['threads']} "
        "threads."
    ]
    if runner["overhead"] is not None:
        lines.append(
            f"{runner['decode']:.1f} s of decoding, {runner['load']:.1f} s of loading; the runner took "
            f"{runner['overhead']:.1%} of the decoding time."
        )
    lines.append("Intervals are 95 % bootstrap intervals over prompts; speed-ups are paired with plain decoding.")
    return "".join(f"<p>{text(line)}</p>" for line in lines)


def _banners(summary: Mapping[str, Any]) -> str:
    gate, made = summary["gate"], []
    if gate["differing"]:
        count = len(gate["differing"])
        made.append(("bad", f"EQUALITY GATE: {count} of {gate['compared']} rows differ from plain decoding's text"))
    elif gate["compared"]:
        made.append(("good", f"Equality gate: all {gate['compared']} comparable rows are plain decoding's text"))
    else:
        made.append(("warn", "Equality gate: no row could be compared with plain decoding"))
    if gate["lossy"]:
        made.append(("bad", f"LOSSY acceptance rule: {', '.join(gate['lossy'])}"))
    if summary["missing"]:
        made.append(("warn", f"{summary['missing']} rows are missing yet"))
    failed = sum(e["rows"] for e in summary["errors"])
    if failed:
        made.append(("bad", EVERY_ROW_FAILED if failed == summary["rows"] else f"{failed} rows failed"))
    return "".join(f'<p class="banner {kind}">{text(line)}</p>' for kind, line in made)


def _table(heads: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{text(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _settings_table(summary: Mapping[str, Any]) -> str:
    heads = ("setting", "rows", "tokens/round", "acceptance", "tokens/s", "speed-up", "without prefill", "p")
    lines = []
    for name, s in summary["settings"].items():
        same = "-" if not s["compared"] else f"{s['compared'] - s['differing']} of {s['compared']}"
        p, predicted = s.get("speedup_p"), s.get("predicted_speedup")
        lines.append([
            text(name), str(s["rows"]),
            interval(s["tokens_per_round"]), interval(s["acceptance"]) if s["drafts"] else "-",
            interval(s["tokens_per_second"], ".1f"), interval(s.get("speedup")), interval(s.get("decode_speedup")),
            "-" if p is None else f"{p:.3g}", "-" if predicted is None else f"{predicted:.2f}",
            f'<b class="bad">{same}</b>' if s["differing"] else same, str(s["errors"]),
        ])  # fmt: skip
    return _table((*heads, "predicted", "equal to plain", "errors"), lines)


def _comparison_table(summary: Mapping[str, Any]) -> str:
    if not summary["comparisons"]:
        return "<p>One setting drafts: there is nothing to compare.</p>"
    figures = ("tokens_per_round", "acceptance", "tokens_per_second")
    heads = ["setting", "against"]
    for name in figures:
        heads += [f"{name.replace('_', ' ')}: difference", "p"]
    lines = []
    for entry in summary["comparisons"]:
        cells = [text(entry["setting"]), text(entry["against"])]
        for name in figures:
            p = entry[name]["p"]
            cells += [interval(entry[name], "+.2f"), "-" if p is None else f"{p:.3g}"]
        lines.append(cells)
    return _table(heads, lines)


def _category_table(summary: Mapping[str, Any]) -> str:
    categories = list(dict.fromkeys(c for entry in summary["categories"].values() for c in entry))
    lines = [
        [text(name), *(interval((entry.get(c) or {}).get("tokens_per_round")) for c in categories)]
        for name, entry in summary["categories"].items() if summary["settings"][name]["drafts"]
    ]  # fmt: skip
    return "<p>Tokens a round.</p>" + _table(["setting", *categories], lines)


def _plots(rows: Sequence[Row]) -> list[str]:
    """Every plot that these rows allow, of the first settings where there are many, and why the others are missing."""
    from specdec.research.ablation.plots import PLOTS

    drafting = list(dict.fromkeys(r["setting"] for r in rows if r["drafts"]))
    shown = set(drafting[:SHOWN_SETTINGS])
    rows = [r for r in rows if not r["drafts"] or r["setting"] in shown]
    made = []
    if len(drafting) > SHOWN_SETTINGS:
        made.append(f"<p>The first {SHOWN_SETTINGS} of {len(drafting)} settings that draft.</p>")
    for title, plot in PLOTS.items():
        try:
            figure = plot(rows)
        except SpecdecError as error:  # this table has nothing for it: no axis k, no draft
            made.append(f"<p>Not drawn: {text(error)}.</p>")
            continue
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        image = base64.b64encode(buffer.getvalue()).decode()
        made.append(
            f'<figure><figcaption>{text(title)}</figcaption><img alt="{text(title)}" '
            f'src="data:image/png;base64,{image}"></figure>'
        )
    return made


def _differences(manifest: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    differing = [r for r in rows if r["equals_plain"] is False]
    if not differing:
        return []
    plain = {(r["cell"], r["prompt"]): r for r in rows if not r["drafts"]}
    lines = []
    for row in differing[:SHOWN_DIFFERENCES]:
        reference = plain[row["plain"], row["prompt"]]
        lines.append([
            text(row["setting"]), text(row["prompt"]), str(row["seed"]), str(row["first_difference"]),
            text(repr((reference["text"] or "")[:SHOWN_TEXT])), text(repr((row["text"] or "")[:SHOWN_TEXT])),
        ])  # fmt: skip
    heads = ("setting", "prompt", "seed", "first difference", "plain", "this setting")
    return ["<h2>Rows that differ from plain decoding</h2>", _table(heads, lines)]


def _errors(summary: Mapping[str, Any]) -> list[str]:
    lines = [[text(e["setting"]), str(e["rows"]), text(e["error"])] for e in summary["errors"]]
    return ["<h2>Errors</h2>", _table(("setting", "rows", "error"), lines)] if lines else []


def _examples(manifest: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A few prompts with the text of each setting that is not plain's own."""
    texts = {p["id"]: p["text"] for p in manifest["prompts"]}
    made = []
    for prompt in list(texts)[:SHOWN_ROWS]:
        outputs: dict[str, list[str]] = {}
        for row in rows:
            if row["prompt"] == prompt and row["text"] is not None:
                outputs.setdefault(row["text"], []).append(row["setting"])
        blocks = "".join(
            f"<p>{text(', '.join(dict.fromkeys(names)))}</p><pre>{text(output[:SHOWN_TEXT])}</pre>"
            for output, names in list(outputs.items())[:3]
        )
        made.append(
            f"<details><summary>{text(prompt)}</summary><p>end of the prompt</p>"
            f"<pre>{text(texts[prompt][-SHOWN_TEXT:])}</pre>{blocks}</details>"
        )
    return "".join(made)


def need_matplotlib() -> None:
    """Raise SpecdecError where the report's plots could not be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SpecdecError("reports need the package matplotlib: install specdec[research]") from None
