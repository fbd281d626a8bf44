"""Prompts to train a chat model's drafters with, none of them of a benchmark that the drafters are measured on.

    python scripts/write_chat_prompts.py runs/chat.jsonl --target smollm2-135m --count 8000

Most are written by the target itself: given its chat template up to where a user speaks, it writes what a user would
say (Magpie, Xu et al. 2024). They come with HumanEval's prompts and GSM8K's questions, but for those that Spec-Bench
has: 80 of its questions are GSM8K's, with other words after them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specdec import SpeculativeDecoder
from specdec.models.loading import pick_device
from specdec.research.models.choice import locate
from specdec.research.prompts.datasets import load_prompts

MARK, BATCH, TOKENS = "\x00", 256, 128
SHORTEST = 16  # characters of a prompt
OPENING = 60  # characters by which texts are told apart


def opening(text: str) -> str:
    """How a text begins, in small letters without punctuation."""
    return re.sub(r"\W+", " ", text.lower()).strip()[:OPENING]


def without(texts: Iterable[str], measured: Iterable[str]) -> list[str]:
    """Texts that begin as none of the measured ones does, and none as an earlier one."""
    seen, kept = {opening(text) for text in measured}, []
    for text in texts:
        if (mark := opening(text)) not in seen:
            seen.add(mark)
            kept.append(text)
    return kept


def beginning(tokenizer: Any) -> str:
    """The chat template up to the user's first words."""
    text: str = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    return text.split(MARK)[0]


def written(decoder: SpeculativeDecoder, count: int) -> Iterator[str]:
    """What the target says in a user's place, finished texts alone."""
    ids = decoder.tokenizer(beginning(decoder.tokenizer), add_special_tokens=False)["input_ids"]
    for first in range(0, count, BATCH):
        seeds = list(range(first, min(first + BATCH, count)))
        rows = [list(ids) for _ in seeds]
        out = decoder.generate(rows, TOKENS, [], temperature=1.0, top_p=0.95, seed=seeds, batch_size=BATCH)
        for text, reason in zip(out.texts or (), out.finish_reasons, strict=True):
            if reason == "eos" and len(text.strip()) >= SHORTEST:
                yield text.strip()
        print(f"{seeds[-1] + 1} of {count} written", flush=True)


def main() -> None:
    """Write the prompts of all sources, shuffled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2-135m", help="a chat model as specdec takes it")
    parser.add_argument("--count", type=int, default=8000, help="texts that the target writes")
    parser.add_argument("--device")
    args = parser.parse_args()
    measured = [turn for prompt in load_prompts("spec-bench", turns="all") for turn in prompt.turns]
    device = pick_device(args.device)
    how = {"device": device, "compile": "graph" if device.type == "cuda" else "off"}
    decoder = SpeculativeDecoder.from_pretrained(locate(args.target), strategies=[], exact=False, **how)
    own = [prompt.text.strip() for name in ("gsm8k", "humaneval") for prompt in load_prompts(name)]
    kept = without([*own, *written(decoder, args.count)], measured)
    random.Random(0).shuffle(kept)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in kept), encoding="utf-8")
    print(f"{len(kept)} prompts: {args.out}")


if __name__ == "__main__":
    main()
