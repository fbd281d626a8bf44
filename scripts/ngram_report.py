"""The blocks of docs/ngram.md, from what scripts/measure_ngrams.py measured: cost, acceptance, parity switches."""

from __future__ import annotations

from typing import Any

from documents import made_with

from specdec.research.bench.tables import markdown


def cost_block(result: dict[str, Any]) -> str:
    """Microseconds of a round and milliseconds to index, by context; memory."""
    contexts = list(next(iter(result["strategies"].values())))
    heads = ["strategy", *(f"{int(c):,}" for c in contexts), *(f"index {int(c):,}" for c in contexts)]
    rows = [
        [name, *(f"{by[c]['round_us']:.0f}" for c in contexts), *(f"{by[c]['index_ms']:.1f}" for c in contexts)]
        for name, by in result["strategies"].items()
    ]
    memory = result["memory"]
    return (
        f"Draft and accept of one row, microseconds of a round (median of {result['rounds']}, real text, drafts of up "
        f"to {result['cap']} tokens), and milliseconds to index a prompt, by tokens of context; one core. "
        f"{made_with(result, 'scripts/measure_ngrams.py cost')}\n\n{markdown(heads, rows)}\n\n"
        f"Memory: ngram-mod's table {memory['ngram_mod_table_bytes'] / 2**20:.0f} MiB a decoder; suffix "
        f"{memory['suffix_live_bytes_per_token']:.1f} bytes a token of a live row and "
        f"{memory['suffix_frozen_bytes_per_token']:.1f} of a frozen store."
    )


def acceptance_block(result: dict[str, Any]) -> str:
    """Tokens per round of every strategy, suffix's lead by category, and what the switches change."""
    models = result["models"]
    head = (
        f"Tokens per round on kept greedy texts of all Spec-Bench prompts (first turns, {result['new_tokens']} new "
        f"tokens), at most {result['cap']} drafted tokens a round, every prompt on its own. "
        f"{made_with(result, 'scripts/measure_ngrams.py acceptance')}"
    )
    of_leads = (
        "Lead of `suffix` over the best other strategy of the category, in tokens per round, with the 95 % interval of "
        f"a paired bootstrap over the prompts ({result['resamples']} resamples). Looped outputs (the last 48 tokens "
        "repeat with a period of at most 16) are kept apart."
    )
    leads = [f"**{name}**\n\n{_leads(model['strategies']['categories'])}" for name, model in models.items()]
    of_switches = (
        f"Parity switches: one chain for all prompts, one after the other in {result['slots']} slots, as in a server; "
        "accepted tokens, of drafted ones."
    )
    return "\n\n".join([head, _strategies(models), of_leads, *leads, of_switches, _switches(models)])


def _strategies(models: dict[str, Any]) -> str:
    figures = [m["strategies"]["all"]["tokens_per_round"] for m in models.values()]
    return markdown(["strategy", *models], [[f"`{name}`", *(f"{f[name]:.3f}" for f in figures)] for name in figures[0]])


def _leads(categories: dict[str, Any]) -> str:
    rows = []
    for category, group in categories.items():
        lead, figures = group["suffix_lead"], group["tokens_per_round"]
        interval = f"{lead['lead']:+.3f} ({lead['low']:+.3f} to {lead['high']:+.3f})"
        best = f"`{lead['over']}` {figures[lead['over']]:.3f}"
        rows.append([category, str(group["prompts"]), f"{figures['suffix']:.3f}", best, interval])
    ahead = [g["suffix_lead"] for c, g in categories.items() if not c.startswith("(")]
    won, sure = (sum(lead[bound] > 0 for lead in ahead) for bound in ("lead", "low"))
    summary = f"`suffix` leads in {won} of {len(ahead)} categories; in {sure} the interval excludes zero."
    return f"{markdown(['category', 'prompts', 'suffix', 'best other', 'lead'], rows)}\n\n{summary}"


def _switches(models: dict[str, Any]) -> str:
    rows = []
    for name, entry in next(iter(models.values()))["switches"].items():
        options = ":".join(f"{k}={v}" for k, v in entry["options"].items())
        for variant in entry["variants"]:
            cells = []
            for model in models.values():
                figures = model["switches"][name]["variants"]
                change = figures[variant]["accepted"] / max(1, figures["parity"]["accepted"]) - 1
                drafted = f"{figures[variant]['accepted']:,} of {figures[variant]['drafted']:,}"
                cells.append(drafted if variant == "parity" else f"{drafted} ({change:+.1%})")
            rows.append([f"`{name}{':' + options if options else ''}`", variant, *cells])
    return markdown(["strategy", "switch", *models], rows)
