"""Make an EAGLE head for a small target one for the same target inflated (specdec/research/models/inflate.py).

python scripts/inflate_head.py runs/eagle3_smollm2/head runs/eagle3_smollm2/head-6b --target smollm2-135m --sizes 6b
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specdec.drafters.eagle3 import EagleHead, export, load_head
from specdec.errors import SpecdecError
from specdec.models.loading import LoadedPair
from specdec.research.models.choice import locate
from specdec.research.models.inflate import Inflation, grown_config, spread


@torch.no_grad()
def inflate_head(head: EagleHead, model: Any, sizes: Inflation) -> EagleHead:
    """A head with the same drafts for the inflated `model`, in float32.

    It observes the same layers, and its `fc` [H, 3 * D] has the columns of `head` where the large model's states hold
    the small one's numbers. Its own width stays, so it has tables of its own, those of `model` where `head` borrowed
    them. Raises SpecdecError for heads that norm the states before `fc`, and for sizes below the model's own.
    """
    config = head.config
    if config.version != 3 or config.fc_norm or config.norm_before_fc:
        raise SpecdecError("inflate: only EAGLE-3 heads without norms before fc can be inflated")
    d, wide = model.config.hidden_size, grown_config(model.config, sizes).hidden_size
    own_lm_head = not (config.tied and config.own_embedding)
    layers = config.observed_layers(model.config.num_hidden_layers)
    grown = replace(config, target_hidden_size=wide, layer_ids=layers, own_embedding=True, own_lm_head=own_lm_head)
    state = {name: tensor.float() for name, tensor in head.state_dict().items()}
    columns = torch.cat([spread(d, wide) + i * wide for i in range(config.observed)])
    narrow = state["fc.weight"]
    state["fc.weight"] = narrow.new_zeros(len(narrow), grown.observed_size).index_copy(1, columns, narrow)
    state.setdefault("embed_tokens.weight", model.get_input_embeddings().weight.float())
    if own_lm_head:
        state.setdefault("lm_head.weight", model.get_output_embeddings().weight.float())
    made = EagleHead(grown, head.d2t)
    made.load_state_dict(state)
    return made.eval().requires_grad_(False)


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
