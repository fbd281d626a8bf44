"""Steps 2 to 4 of a round on the device: the target's pass over [newest token, draft ...], and acceptance.

`verify` computes all that the host will read: the pass, the scores, the acceptance rule, and what records ask for. It
uses tensors alone, so where the runner replays passes it is recorded as a whole (device/graphs.py), under a `VerifyKey`
that names all that is fixed in it.

Processors that read the text are part of it, as far as they have a vectorised form (sampling/processors.py): the known
texts are among the inputs. A user's own processors are called on the host, and a user's rule may do anything: there the
function is not recorded, only the pass inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.decoding.acceptance import AcceptanceRule, Block, Verdict, judge
from specdec.decoding.probe import Probe
from specdec.device.buffers import Buffers
from specdec.device.host_read import Packed
from specdec.models.kv_cache import RaggedCache
from specdec.models.passes import PassInputs, PassKey
from specdec.models.runner import Runner
from specdec.models.trees import MISSING, Tree, TreePass
from specdec.sampling.prefixes import History, Prefixes, chain_paths
from specdec.sampling.processors import Texts
from specdec.sampling.sampling import Sampling
from specdec.sampling.texts import Known, KnownTexts

# Columns of `VerifyInputs.table`; S drafted ids follow, and with trees S parents.
STARTS, COUNTS, LAST, KEYS, POSITIONS, DONE, ROUNDS, TOTALS, HAS_Q, LIMITS, DRAFT = range(11)


class Wanted(NamedTuple):
    """What a call reads from its passes beside the tokens.

    p_and_q: p and q at drafted tokens
    details: with `p_and_q`, details with so many most likely tokens per position; 0 = none
    logprobs: the log-probability of each emitted token
    likely: with `logprobs`, and of so many most likely tokens in its place
    """

    p_and_q: bool = False
    details: int = 0
    logprobs: bool = False
    likely: int = 0


NOTHING = Wanted()


class VerifyKey(NamedTuple):
    """What is fixed in a recorded verify pass.

    given: the pass itself
    limit: most tokens tested per row
    vocab_size: the target's
    rule: the acceptance rule
    sampling: signature of the scores' pipeline
    all_have_q: all drafts have a q
    levels, siblings: bounds of the trees; 0 = chains only
    wanted: what the host reads beside the tokens
    """

    given: PassKey
    limit: int
    vocab_size: int
    rule: AcceptanceRule
    sampling: Any
    all_have_q: bool
    levels: int
    siblings: int
    wanted: Wanted


@dataclass(frozen=True)
class VerifyInputs(Buffers):
    """What a verify pass is given.

    table [B, DRAFT + S], with trees [B, DRAFT + 2 S]: STARTS ... LIMITS, the drafted ids, the trees' parents
    q [B, S, V]: column s is the distribution that drafted token s was sampled from; None: no draft has q
    states [B, S, H]: what the layers that the pass leaves out made of the fed tokens; None: it runs all layers
    known: the rows' texts, for processors that read them
    """

    table: Tensor
    q: Tensor | None = None
    states: Tensor | None = None
    known: Known | None = None


@dataclass(frozen=True)
class Verified(Buffers):
    """What `verify` returns.

    packed: what the host will read
    fed, logits, hidden, where: for drafters that observe the target; None: there are none
    """

    packed: Packed
    fed: Tensor | None = None
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None
    where: TreePass | None = None


def verify(
    runner: Runner,
    cache: RaggedCache,
    sampling: Sampling,
    key: VerifyKey,
    inputs: VerifyInputs,
    texts: KnownTexts | None = None,
    history: History | None = None,
) -> Verified:
    """Run the pass and accept, from tensors alone.

    texts: for processors that read them, as far as `inputs` does not have them
    history: for processors that are called on the host; the fed ids are added here
    """
    fed, draft, outside = _fed(inputs.table, key.vocab_size, key.given.width)
    tree = where = None
    if key.levels:
        tree, where = runner.part(_trees)(inputs.table, key.levels, key.siblings, key.given.width)
    out = runner.forward(cache, key.given, PassInputs(fed, inputs.table[:, :LAST].T, where, inputs.states))
    read = None
    if texts is not None and inputs.known is not None:
        width = key.given.width
        on_path = chain_paths(len(fed), width, width, fed.device) if tree is None else tree.lineage
        prefixes = Prefixes(inputs.known.ids, inputs.table[:, STARTS], fed, on_path)
        read = texts.texts(inputs.known, prefixes, None if history is None else replace(history, fed=fed))
    # Compiled only where it computes nothing with the scores but to compare them: sums would round differently.
    lossless = key.rule.recordable and not key.rule.lossy
    compares = sampling.greedy and lossless and key.wanted == NOTHING
    decide = runner.part(_decide) if compares and read is None else _decide
    flat, names, forms = decide(out.logits, inputs, draft, outside, tree, key, sampling, read)
    seen = (fed, out.logits, out.hidden, where) if key.given.observed is not None else ()
    return Verified(Packed(flat, names, forms), *seen)


def _fed(table: Tensor, vocab_size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids of the pass [B, width], the drafted ids [B, S], 0 where the target lacks one, and True there."""
    draft = table[:, DRAFT : DRAFT + width]
    outside = (draft < 0) | (draft >= vocab_size)
    draft = draft.masked_fill(outside, 0)
    return torch.cat([table[:, LAST, None], draft[:, : width - 1]], dim=1), draft, outside


def _trees(table: Tensor, levels: int, siblings: int, width: int) -> tuple[Tree, TreePass]:
    """Return the rows' trees, and where the pass puts their tokens."""
    tree = Tree.of(table[:, DRAFT + width :], levels, siblings, table[:, LIMITS])
    return tree, TreePass.of(tree, table[:, STARTS], table[:, COUNTS])


def _decide(
    logits: Tensor,
    inputs: VerifyInputs,
    draft: Tensor,
    outside: Tensor,
    tree: Tree | None,
    key: VerifyKey,
    sampling: Sampling,
    texts: Texts | None,
) -> tuple[Tensor, tuple[str, ...], tuple[Any, ...]]:
    """Compute what the host will read from the pass's logits: the fields of `Packed`."""
    q, numbers = inputs.q, inputs.table[:, :DRAFT].T
    totals, missing = numbers[TOTALS], None
    if tree is not None:
        missing = inputs.table[:, DRAFT : DRAFT + key.given.width] == MISSING
        outside = outside & ~missing
    block = Block(
        scores=sampling.scores(logits[..., : key.vocab_size], texts),
        draft=draft,
        lengths=totals.clamp(max=key.limit),
        final=totals < key.limit,
        totals=totals,
        keys=numbers[KEYS],
        positions=numbers[POSITIONS],
        sampling=sampling,
        q=q,
        has_q=None if q is None else numbers[HAS_Q] > 0,
        all_have_q=key.all_have_q,
        tree=tree,
        done=numbers[DONE],
        round_keys=numbers[ROUNDS],
        outside=outside,
        missing=missing,
    )
    packed = Packed.of(_wanted(block, judge(block, key.rule), key))
    return packed.flat, packed.names, packed.forms


def _wanted(block: Block, verdict: Verdict, key: VerifyKey) -> dict[str, Tensor]:
    """Compute the fields of `VerifyResult`; slots come first in every tensor."""
    asked = key.wanted
    assert verdict.unsound is not None
    wanted = {
        "accepted": verdict.accepted, "token": verdict.token, "failed": verdict.failed, "totals": block.totals,
        "draft": block.draft if block.missing is None else block.draft.masked_fill(block.missing, MISSING),
        "unsound": verdict.unsound,
    }  # fmt: skip
    rows = torch.arange(len(block.draft), device=block.draft.device)[:, None]
    if verdict.path is not None and block.tree is not None:
        wanted |= {"path": verdict.path, "parents": block.tree.parents}
    if asked.logprobs:
        emitted, columns = verdict.emitted(block.draft)
        logarithms = torch.log_softmax(block.scores, dim=-1)  # [B, S, V]
        wanted["logprobs"] = logarithms[rows, columns, emitted]
        if asked.likely:
            likely = logarithms.topk(min(asked.likely, logarithms.shape[-1]))
            wanted |= {"top_ids": likely.indices[rows, columns], "top_logprobs": likely.values[rows, columns]}
    if key.rule.lossy and key.rule.distance is not None:
        wanted["distances"] = key.rule.distance(block, verdict)
    if asked.p_and_q:
        tested_at = block.columns.expand_as(block.draft) if block.tree is None else block.tree.tested_at
        wanted["p"] = block.p[rows, tested_at, block.draft]
        wanted["q"] = (block.p if block.q is None else block.q).gather(-1, block.draft[..., None])[..., 0]
    if asked.p_and_q and asked.details:
        found = Probe(block, verdict, key.rule, asked.details).tensors()
        wanted |= {f"details.{i}": tensor for i, tensor in enumerate(found)}
    return wanted
