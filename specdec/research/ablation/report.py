"""The report: one HTML file that opens from disk. No script, no network, every text escaped.

A content security policy forbids everything but inline styles and images inside the file, so that not even a mistake
here could fetch something.
"""

from __future__ import annotations

import base64
import html
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from specdec.errors import SpecdecError
from specdec.files.texts import dump_yaml_text
from specdec.research.ablation.look import CHAINS, MANY_SETTINGS, panels, svg
from specdec.research.ablation.table import Row
from specdec.research.ablation.tables import category_table, comparison_table, loop_warning, settings_table
from specdec.research.bench.tables import Table
from specdec.research.bootstrap import least_p
from specdec.research.colours import page_style

SHOWN_TEXT = 400  # characters of a prompt's end and of an output
SHOWN_DIFFERENCES, SHOWN_ROWS, SHOWN_TEXTS = 20, 8, 3
EVERY_ROW_FAILED = "Every row failed: there are no figures and no plots"
INTERVAL = re.compile(r"^([\d.-]+ )(\([\d. to-]+\))$")  # is broken before it, never inside
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1400px; margin: 0 auto; padding: 1em; overflow-wrap: anywhere;
  color: var(--text); background: var(--ground); }
p, pre, h1, h2 { max-width: 1100px; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-size: 13px; overflow-wrap: normal; }
th, td { padding: 4px 8px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { background: var(--panel); }
th:first-child, td:first-child { text-align: left; min-width: 9em; }
.scroll { overflow-x: auto; } .whole { white-space: nowrap; }
.banner { padding: .6em 1em; border-radius: 6px; font-weight: 600; }
.good { background: var(--good); } .bad { background: var(--bad); color: var(--rejected); }
.warn { background: var(--warn); }
pre { background: var(--panel); padding: .8em; overflow-x: auto; white-space: pre-wrap; font-size: 12px; }
figure { margin: 1em 0; display: grid; gap: 8px;
  grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); }
img { width: 100%; max-width: 700px; }
figcaption { font-weight: 600; grid-column: 1 / -1; }
summary { cursor: pointer; } summary + p { color: var(--quiet); }
"""


def render(manifest: Mapping[str, Any], rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    """The whole page."""
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>specdec ablation</title><style>{page_style()}{STYLE}</style></head><body>"
    )
    config = dump_yaml_text(manifest["config"])
    errors = [[e["setting"], str(e["rows"]), e["error"]] for e in summary["errors"]]
    differing = [i for i, entry in enumerate(summary["settings"].values()) if entry["differing"]]
    sections = {
        "Settings": _table(settings_table(summary), differing),
        "Paired comparisons": _comparisons(summary),
        "By category": "<p>Tokens per round.</p>" + _table(category_table(summary)),
        "Plots": "\n".join(_plots(rows)),
        "Rows that differ from plain decoding": _differences(rows),
        "Errors": _table(Table("", ("setting", "rows", "error"), errors)),
        "Rows": _examples(manifest, rows),
        "Config": f"<pre>{text(config)}</pre>",
    }
    parts = [head, "<h1>Ablation</h1>", _made_with(manifest, summary), _banners(summary)]
    parts += [f"<h2>{title}</h2>\n{body}" for title, body in sections.items() if body]
    return "\n".join([*parts, "</body></html>\n"])


def text(value: Any) -> str:
    """Anything as text of the page; control characters and halves of characters, which it cannot hold, as U+FFFD."""
    shown = html.escape(str(value), quote=True)
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\ufffd" for c in shown)


def _made_with(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    versions, machine, runner = manifest["versions"], manifest["machine"], summary["runner"]
    lines = [
        f"{summary['rows']:,} rows of {len(manifest['cells']):,} cells and {len(manifest['prompts']):,} prompts; "
        f"{manifest['date']}, specdec {versions['specdec']} at commit {manifest['commit']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}; {machine['gpu'] or machine['processor']}, {machine['threads']} "
        "threads."
    ]
    for pair, loaded in manifest.get("models", {}).items():
        lines.append(f"{pair}: {'; '.join(', '.join(_named(*one) for one in models.items()) for models in loaded)}.")
    if runner["overhead"] is not None:
        lines.append(
            f"{runner['decode']:.1f} s of decoding, {runner['load']:.1f} s of loading; the runner took "
            f"{runner['overhead']:.1%} of the decoding time."
        )
    prompts = len({p.get("conversation", p["id"]) for p in manifest["prompts"]})
    known = "Intervals are 95 % bootstrap intervals over prompts" if prompts > 1 else "One prompt has no intervals"
    lines.append(f"{known}; speed-ups are paired with plain decoding.")
    floor = least_p(prompts)
    if floor is not None:
        lines.append(
            f"p-values flip the signs of the prompts' differences: with so few prompts none is below {floor:.2g}."
        )
    return "".join(f"<p>{text(line)}</p>" for line in lines)


def _named(role: str, model: Mapping[str, Any]) -> str:
    """What a model is: its name or class, and the hub's commit or the revision, and the hash of its weights."""
    revision = model.get("commit") or model.get("revision")
    parts = [model.get("name") or model.get("class") or "unknown", *([f"revision {revision}"] if revision else [])]
    return f"{role} {', '.join(parts)}, weights {model.get('weights')}"


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
    if loops := loop_warning(summary):
        made.append(("warn", loops))
    if summary.get("context_rows"):
        count = summary["context_rows"]
        made.append(("warn", f"{count} of {summary['rows']} texts ended at the context's limit, before max_new_tokens"))
    for setting, found in summary.get("warnings", {}).items():
        made += [("warn", f"{setting}: {line}") for line in found]
    if summary["missing"]:
        made.append(("warn", f"{summary['missing']} rows are missing"))
    failed = sum(e["rows"] for e in summary["errors"])
    if failed:
        made.append(("bad", EVERY_ROW_FAILED if failed == summary["rows"] else f"{failed} rows failed"))
    return "".join(f'<p class="banner {kind}">{text(line)}</p>' for kind, line in made)


def _table(table: Table, bad: Collection[int] = ()) -> str:
    """A table, nothing without rows; bad: rows that are marked."""
    made = table.html(bad, lambda cell: INTERVAL.sub(r'\1<span class="whole">\2</span>', text(cell)))
    return f'<div class="scroll">{made}</div>' if table.rows else ""


def _comparisons(summary: Mapping[str, Any]) -> str:
    if not summary["comparisons"]:
        return "<p>One setting drafts: there is nothing to compare.</p>"
    made = comparison_table(summary)
    return f"<p>{text(made.title)}</p>" * bool(made.title) + _table(made)


def _plots(rows: Sequence[Row]) -> list[str]:
    """Every plot that these rows allow, with an image a chain where there are many settings, and why the others are
    missing. Images of their own, and no panels of one, so that they fit under each other into a narrow window."""
    from specdec.research.ablation.plots import PLOTS

    drafting = list(dict.fromkeys(r["setting"] for r in rows if r["drafts"]))
    parts = panels(rows, CHAINS if len(drafting) > MANY_SETTINGS else None)
    made = []
    for title, plot in PLOTS.items():
        images, reasons = [], []
        for name, own in parts.items():
            try:
                figure = plot(own)
            except SpecdecError as error:  # these rows have nothing for it: no axis k, no draft
                reasons.append(str(error))
                continue
            name = name.partition("\n")[0]
            figure.axes[0].set_title(name, fontsize=10)
            image = base64.b64encode(svg(figure).encode()).decode()
            images.append(f'<img alt="{text(f"{title} {name}")}" src="data:image/svg+xml;base64,{image}">')
        if images:
            made.append(f"<figure><figcaption>{text(title)}</figcaption>{''.join(images)}</figure>")
        made += [f"<p>Not drawn: {text(reason)}.</p>" for reason in dict.fromkeys(reasons)]
    return made


def _differences(rows: Sequence[Row]) -> str:
    plain = {(r["cell"], r["prompt"]): r for r in rows if not r["drafts"]}
    lines, found = [], [r for r in rows if r["equals_plain"] is False]
    for row in found[:SHOWN_DIFFERENCES]:
        texts = [repr((r["text"] or "")[:SHOWN_TEXT]) for r in (plain[row["plain"], row["prompt"]], row)]
        lines.append([row["setting"], row["prompt"], str(row["seed"]), str(row["first_difference"]), *texts])
    heads = ("setting", "prompt", "seed", "first difference", "plain", "this setting")
    return _table(Table("", heads, lines)) + _more(found, SHOWN_DIFFERENCES, "rows")


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
            for output, names in list(outputs.items())[:SHOWN_TEXTS]
        )
        blocks += _more(outputs, SHOWN_TEXTS, "texts")
        made.append(
            f"<details><summary>{text(prompt)}</summary><p>end of the prompt</p>"
            f"<pre>{text(texts[prompt][-SHOWN_TEXT:])}</pre>{blocks}</details>"
        )
    return "".join(made) + _more(texts, SHOWN_ROWS, "prompts")


def _more(found: Collection[Any], shown: int, what: str) -> str:
    """Say how many are not shown, if any."""
    return f"<p>and {len(found) - shown} more {what}</p>" if len(found) > shown else ""
