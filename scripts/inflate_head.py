"""Make an EAGLE head for a small target one for the same target inflated (specdec/research/models/inflate.py).

python scripts/inflate_head.py runs/eagle3_smollm2/head runs/eagle3_smollm2/head-6b --target smollm2-135m --sizes 6b
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from specdec.drafters.eagle3 import export, load_head
from specdec.models.loading import LoadedPair
from specdec.research.models.choice import locate
from specdec.research.models.inflate import Inflation, inflate_head


def main() -> None:
    """Read a head, and write the other one in bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2-135m", help="the head's own target")
    parser.add_argument("--sizes", default="6b", help="1b, 3b, 6b, or sizes as `models: {inflate: ...}` takes them")
    args = parser.parse_args()
    target = LoadedPair.load(locate(args.target), device="cpu", dtype="float32").target
    made = inflate_head(load_head(args.head).head, target, Inflation.parse(args.sizes))
    export(made.to(torch.bfloat16), args.out, "speculators", args.target)
    print(f"{made.config.hidden_size} wide, for states {made.config.target_hidden_size} wide: {args.out}")


if __name__ == "__main__":
    main()
