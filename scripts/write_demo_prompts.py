"""Pieces of the standard library that the embedded target was trained on, as prompts to train its drafters with.

    python scripts/write_demo_prompts.py runs/stdlib.jsonl --count 3000 --lines 24
    python scripts/write_demo_prompts.py runs/stdlib.jsonl --count 12000 --lines 12 --longest 600

Held-out files (see measure_demo_models.py) are left out. A piece begins at a line that begins in the first column, or
where the one before has so many characters.
"""

import argparse
import json
import random
import sysconfig
from pathlib import Path

from measure_demo_models import read_corpus


def pieces(text: str, lines: int, longest: int | None = None) -> list[str]:
    """A file in pieces of at least so many lines, or of `longest` characters and the rest of a line; the last one left
    out."""
    found, rows = [], text.split("\n")
    first = size = 0
    for i, row in enumerate(rows):
        if (i - first >= lines and row[:1].strip()) or (longest is not None and size >= longest):
            found.append("\n".join(rows[first:i]) + "\n")
            first, size = i, 0
        size += len(row) + 1
    return found


def main() -> None:
    """Write a sample of all pieces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--lines", type=int, default=24)
    parser.add_argument("--longest", type=int, help="characters at which a piece ends in any case")
    args = parser.parse_args()
    texts = [text for _, text in read_corpus(args.source)[0]]
    found = [piece for text in texts for piece in pieces(text, args.lines, args.longest) if len(piece) > 200]
    chosen = random.Random(0).sample(found, min(args.count, len(found)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps({"prompt": piece}) + "\n" for piece in chosen), encoding="utf-8")
    print(f"{len(chosen)} of {len(found)} pieces: {args.out}")


if __name__ == "__main__":
    main()
