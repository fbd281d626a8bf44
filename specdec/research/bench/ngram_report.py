"""Markdown tables of what scripts/measure_ngrams.py measured: cost, acceptance by category, parity switches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def made_with(result: dict[str, Any]) -> str:
    """Where and with what a result was made."""
    machine, versions = result["machine"], result["versions"]
    return (
        f"{result['date']}, {machine['processor']}, Python {versions['python']}, specdec {versions['specdec']} at "
        f"commit {result['commit']}"
    )


def cost_block(result: dict[str, Any]) -> str:
    """Microseconds a round and milliseconds to index, by context; memory."""
    contexts = list(next(iter(result["strategies"].values())))
    heads = ["strategy", *(f"{int(c):,}" for c in contexts), *(f"index {int(c):,}" for c in contexts)]
    rows = [
        [name, *(f"{by[c]['round_us']:.0f}" for c in contexts), *(f"{by[c]['index_ms']:.1f}" for c in contexts)]
        for name, by in result["strategies"].items()
    ]
    memory = result["memory"]
    return "\n".join([
        f"Draft and accept of one row, microseconds a round (median of {result['rounds']}, real text, drafts of up to "
        f"{result['cap']} tokens), and milliseconds to index a prompt, by tokens of context; one core "
        f"({made_with(result)}).",
        "",
        table(heads, rows),
        "",
        f"Memory: ngram-mod's table {memory['ngram_mod_table_bytes'] / 2**20:.0f} MiB a decoder; suffix "
        f"{memory['suffix_live_bytes_per_token']:.1f} bytes a token of a live row and "
        f"{memory['suffix_frozen_bytes_per_token']:.1f} of a frozen store.",
    ])  # fmt: skip


def acceptance_block(result: dict[str, Any]) -> str:
    """Tokens per round of every strategy, suffix's lead by category, and what the switches change."""
    parts = [
        f"Tokens per round on kept greedy texts of all Spec-Bench prompts (first turns, {result['new_tokens']} new "
        f"tokens), at most {result['cap']} drafted tokens a round, every prompt on its own ({made_with(result)}).",
        "", _strategies(result), "",
        "Lead of `suffix` over the best other strategy of the category, in tokens per round, with the 95 % interval of "
        f"a paired bootstrap over the prompts ({result['resamples']} resamples). Looped outputs (the last 48 tokens "
        "repeat with a period of at most 16) are kept apart.",
    ]  # fmt: skip
    for model, entry in result["models"].items():
        parts += ["", f"**{model}**", "", _leads(entry["strategies"]["categories"])]
    parts += [
        "", f"Parity switches: one chain for all prompts, one after the other in {result['slots']} slots, as in a "
        "server; accepted tokens, of drafted ones.", "", _switches(result),
    ]  # fmt: skip
    return "\n".join(parts)


def _strategies(result: dict[str, Any]) -> str:
    models = result["models"]
    names = next(iter(models.values()))["strategies"]["all"]["tokens_per_round"]
    rows = [
        [f"`{name}`", *(f"{m['strategies']['all']['tokens_per_round'][name]:.3f}" for m in models.values())]
        for name in names
    ]
    return table(["strategy", *models], rows)


def _leads(categories: dict[str, Any]) -> str:
    rows = []
    for category, group in categories.items():
        lead, figures = group["suffix_lead"], group["tokens_per_round"]
        interval = f"{lead['lead']:+.3f} ({lead['low']:+.3f} to {lead['high']:+.3f})"
        best = f"`{lead['over']}` {figures[lead['over']]:.3f}"
        rows.append([category, str(group["prompts"]), f"{figures['suffix']:.3f}", best, interval])
    ahead = [g for c, g in categories.items() if not c.startswith("(")]
    won = sum(g["suffix_lead"]["lead"] > 0 for g in ahead)
    sure = sum(g["suffix_lead"]["low"] > 0 for g in ahead)
    summary = f"`suffix` leads in {won} of {len(ahead)} categories; in {sure} the interval excludes zero."
    return table(["category", "prompts", "suffix", "best other", "lead"], rows) + f"\n\n{summary}"


def _switches(result: dict[str, Any]) -> str:
    rows = []
    first = next(iter(result["models"].values()))["switches"]
    for name, entry in first.items():
        options = ":".join(f"{k}={v}" for k, v in entry["options"].items())
        for variant in entry["variants"]:
            cells = []
            for model in result["models"].values():
                figures = model["switches"][name]["variants"]
                change = figures[variant]["accepted"] / max(1, figures["parity"]["accepted"]) - 1
                drafted = f"{figures[variant]['accepted']:,} of {figures[variant]['drafted']:,}"
                cells.append(drafted if variant == "parity" else f"{drafted} ({change:+.1%})")
            rows.append([f"`{name}{':' + options if options else ''}`", variant, *cells])
    return table(["strategy", "switch", *result["models"]], rows)
