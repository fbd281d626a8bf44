"""`specdec lookup create | merge | stats | show`: lookup-cache files for the strategy ngram-cache and for llama.cpp."""

from __future__ import annotations

import heapq
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from specdec.cli import output
from specdec.cli.inputs import read_prompts
from specdec.cli.options import AsJson
from specdec.errors import SpecdecError
from specdec.files.forms import WHOLE, check
from specdec.files.texts import check_readable, check_writable, parse_json_lines
from specdec.stats import PER_DRAFTED

if TYPE_CHECKING:
    from specdec.drafters.ngram.lookup_cache import LookupCache

STATIC_SIZE = 2  # n-grams of upstream's static files, the only ones it looks up there

HELP = "Make, merge, try and look into lookup-cache files (llama.cpp's format)."
app = typer.Typer(help=HELP, context_settings={"help_option_names": ["-h", "--help"]})

Texts = Annotated[list[Path] | None, typer.Argument(help="Text files; - = standard input.")]
Prompts = Annotated[list[str] | None, typer.Option("--prompt", help="Text; repeat for more.")]
IdFiles = Annotated[list[Path] | None, typer.Option("--ids", help="JSON lines, each a list of token ids.")]
TokenizerName = Annotated[
    str | None, typer.Option("--tokenizer", "--target", help="Hub id, folder, GGUF file, or demo.")
]


@app.command()
def create(
    out: Annotated[Path, typer.Option(help="The file to write.")],
    files: Texts = None,
    prompt: Prompts = None,
    ids: IdFiles = None,
    tokenizer: TokenizerName = None,
    all_sizes: Annotated[bool, typer.Option("--all-sizes", help="1..4 ids, as in dynamic files, not only 2.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count the n-grams of texts and save them: a static file, or with --all-sizes a dynamic one."""
    from specdec.drafters.ngram.lookup_cache import LONGEST, LookupCache

    check_writable(out, "--out")
    rows = _rows(files, prompt, ids, tokenizer)
    cache, sizes = LookupCache(), (1, LONGEST) if all_sizes else (STATIC_SIZE, STATIC_SIZE)
    with output.progress("counting n-grams", len(rows)) as advance:
        for row in rows:
            cache.update(row, None, *sizes)
            advance()
        cache.save(out)
    _report({"file": str(out), "texts": len(rows), "tokens": sum(map(len, rows)), **_facts(cache)}, as_json)


@app.command()
def merge(files: Annotated[list[Path], typer.Argument(help="IN [IN ...] OUT")], as_json: AsJson = False) -> None:
    """Add up the counts of files and save them to the last one named."""
    *inputs, out = files
    if not inputs:
        raise SpecdecError("lookup merge needs at least one file to read and, last, the file to write")
    check_writable(out, "the last file")
    check_readable(*inputs, what="lookup cache")
    from specdec.drafters.ngram.lookup_cache import LookupCache

    cache = LookupCache()
    with output.progress("merging", len(inputs)) as advance:
        for file in inputs:
            cache.merge(LookupCache.load(file))
            advance()
        cache.save(out)
    _report({"file": str(out), "merged": len(inputs), **_facts(cache)}, as_json)


@app.command()
def stats(
    files: Texts = None,
    prompt: Prompts = None,
    ids: IdFiles = None,
    tokenizer: TokenizerName = None,
    static: Annotated[Path | None, typer.Option(help="A static lookup cache.")] = None,
    dynamic: Annotated[Path | None, typer.Option(help="A dynamic lookup cache; the file is not changed.")] = None,
    n_ctx: Annotated[int, typer.Option(min=2, help="Tokens of a chunk; the last chunk is skipped.")] = 4096,
    n_draft: Annotated[int, typer.Option(min=1, help="Most tokens of a draft.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Count how much of a text lookup drafting would get right; no model runs."""
    from specdec.drafters.ngram.lookup_cache import LookupCache
    from specdec.research.offline.lookup import chunk_count, lookup_stats

    row = [token for one in _rows(files, prompt, ids, tokenizer) for token in one]
    known, grown = (None if file is None else LookupCache.load(file) for file in (static, dynamic))
    with output.progress("drafting", chunk_count(len(row), n_ctx)) as advance:
        result = lookup_stats(row, n_ctx, n_draft, known, grown, advance)
    if as_json:
        output.print_json(result)
        return
    rate, names = result["draft_acceptance_rate"], ("rounds", "drafted_rounds", "draft_tokens", "accepted_tokens")
    shown = {
        "tokens": f"{result['tokens']:,} in {result['chunks']:,} chunks of {n_ctx:,}",
        **{name: result[name] for name in names},
        PER_DRAFTED: "-" if rate is None else f"{rate:.2%}",
        "tokens per round": output.number(result["tokens_per_round"]),
        "drafting": f"{result['draft_seconds'] / result['rounds'] * 1e6:.1f} microseconds a round",
    }
    output.stdout().print(output.facts(shown))


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A lookup-cache file.")],
    top: Annotated[int, typer.Option(min=0, help="How many of the most frequent continuations.")] = 10,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Show n-grams by size and the most frequent continuations, as text if a tokenizer is given."""
    check_readable(file, what="lookup cache")
    from specdec.drafters.ngram.lookup_cache import LookupCache
    from specdec.models.loading import load_tokenizer

    cache = LookupCache.load(file)
    vocabulary = None if tokenizer is None else load_tokenizer(tokenizer)
    pairs = ((count, key, token) for key, successors in cache.items() for token, count in successors)
    best = heapq.nsmallest(top, pairs, key=lambda pair: (-pair[0], pair[1:]))
    shown = [_continuation(vocabulary, *pair, cache) for pair in best]
    facts = {"file": str(file), **_facts(cache)}
    if as_json:
        output.print_json({**facts, "most_frequent": shown})
        return
    console = output.stdout()
    console.print(_facts_table(facts))
    if shown:
        console.print(_continuation_table(shown))


def _continuation(vocabulary: Any, count: int, key: tuple[int, ...], token: int, cache: LookupCache) -> dict[str, Any]:
    total = sum(n for _, n in cache.successors(key))
    entry = {"ngram": list(key), "next": token, "count": count, "share": count / total}
    if vocabulary is not None:
        entry |= {"ngram_text": vocabulary.decode(list(key)), "next_text": vocabulary.decode([token])}
    return entry


def _continuation_table(shown: list[dict[str, Any]]) -> Any:
    made = output.table("n-gram", "next", "count", "share", title="Most frequent continuations")
    for entry in shown:
        ids = (" ".join(map(str, entry["ngram"])), str(entry["next"]))
        names = [repr(entry[f"{n}_text"]) for n in ("ngram", "next")] if "next_text" in entry else ids
        made.add_row(*map(escape, names), f"{entry['count']:,}", f"{entry['share']:.0%}")
    return made


def _rows(
    files: list[Path] | None, prompts: list[str] | None, ids: list[Path] | None, tokenizer: str | None
) -> list[list[int]]:
    """Every text as ids: files, then prompts, then lines of id files. Raises SpecdecError for bad or no input."""
    from specdec.models.loading import load_tokenizer

    texts = [*read_prompts([], files or []), *(prompts or [])]
    if texts and tokenizer is None:
        raise SpecdecError("texts need a tokenizer: give --tokenizer, or token ids with --ids")
    rows = []
    if texts:
        vocabulary = load_tokenizer(str(tokenizer))
        rows = [[int(token) for token in vocabulary(text)["input_ids"]] for text in texts]
    rows += [row for file in ids or [] for row in _id_lines(file)]
    if not any(rows):
        raise SpecdecError("no text: give files, --prompt or --ids")
    return rows


def _id_lines(file: Path) -> list[list[int]]:
    [text] = read_prompts([], [file])
    rows = []
    for number, row in parse_json_lines(text, str(file)):
        check(row, [WHOLE], f"{file}, line {number}")
        rows.append(row)
    return rows


def _facts(cache: LookupCache) -> dict[str, Any]:
    sizes = Counter(map(len, cache.parts))
    pairs = [pair for key in cache.parts for pair in cache.successors(key)]
    return {
        "ngrams": len(cache),
        "ngrams_by_size": {size: sizes[size] for size in sorted(sizes)},
        "continuations": len(pairs),
        "occurrences": sum(count for _, count in pairs),
        "max_id": cache.max_id(),
    }


def _facts_table(facts: dict[str, Any]) -> Any:
    by_size = {f"n-grams of {size}": count for size, count in facts["ngrams_by_size"].items()}
    shown = {name: value for name, value in facts.items() if name != "ngrams_by_size"}
    return output.facts({**shown, **by_size})


def _report(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.print_json(facts)
    else:
        output.stdout().print(_facts_table(facts))
