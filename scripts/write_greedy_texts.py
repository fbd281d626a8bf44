"""Generate and keep the greedy continuations on which the n-gram strategies are compared.

    python scripts/write_greedy_texts.py smollm2 --out results/texts_smollm2.npz
    python scripts/write_greedy_texts.py embedded --out results/texts_embedded.npz

Greedy text does not depend on the drafter, so one plain run of a model serves every comparison: the strategies are
replayed on it without the model (`specdec.research.offline.replay`). The file holds the ids of every Spec-Bench prompt
(its first turn, through the chat template where the model has one) and of the text that followed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.demo_models import target_path
from specdec.research.offline.replay import save_texts
from specdec.research.prompts.datasets import load_prompts


def main() -> None:
    """Load the model, generate in batches, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2, embedded, or the folder of a model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dataset", default="spec-bench")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--limit", type=int, default=None, help="prompts in all, spread over the categories")
    arguments = parser.parse_args()
    decoder = specdec.SpeculativeDecoder.from_pretrained(_folder(arguments.model), strategies=[], dtype="float32")
    tokenizer: Any = decoder.tokenizer
    room = decoder.target.context - arguments.max_new_tokens
    prompts = load_prompts(arguments.dataset, limit=arguments.limit)
    rows = []
    for prompt in prompts:
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": prompt.text}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(prompt.text)["input_ids"]
        rows.append([int(t) for t in ids][:room])
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # a batch's cache is as long as its longest row
    outputs: list[list[int]] = [[] for _ in rows]
    for start in range(0, len(order), 2 * arguments.batch_size):
        part = order[start : start + 2 * arguments.batch_size]
        with torch.inference_mode():
            out = decoder.generate(
                [rows[i] for i in part],
                max_new_tokens=arguments.max_new_tokens,
                batch_size=arguments.batch_size,
                exact=False,
            )
        for i, ids in zip(part, out.token_ids, strict=True):
            outputs[i] = ids
        print(f"{start + len(part)} of {len(rows)}", flush=True)
    save_texts(arguments.out, [p.id for p in prompts], [p.category for p in prompts], rows, outputs)


def _folder(model: str) -> str:
    if model == "embedded":
        return str(target_path())
    if model == "smollm2":
        from specdec.research.models.smollm2 import fetch_folder

        return str(fetch_folder())
    return model


if __name__ == "__main__":
    main()
