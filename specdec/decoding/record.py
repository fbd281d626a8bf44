"""Records a pass: one `Round` per row."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.decoding.probe import details_of
from specdec.decoding.result import Round
from specdec.decoding.row import Row, RowVerdict
from specdec.decoding.verify_result import VerifyResult
from specdec.drafters.base import Draft
from specdec.models.trees import depths_of


def record_round(
    row: Row,
    slot: int,
    draft: Draft,
    start: int,
    verdict: RowVerdict,
    emitted: Sequence[int],
    result: VerifyResult,
    took: dict[str, float],
) -> Round:
    """Record the pass of one row.

    start: sequence index of the newest token when the pass began
    emitted: the tokens that the row took, perhaps fewer than the verdict gave
    took: seconds of the pass's draft and verify
    """
    path = verdict.path[: len(emitted)]
    bonus = verdict.bonus if len(emitted) > len(verdict.path) else None
    continues = bonus is None and row.finish_reason is None
    nodes = list(range(verdict.tested if bonus is not None or continues else len(path)))
    parents = result.parents_of(slot, draft)
    place: dict[int, int] = {}
    if parents is not None:
        if bonus is None:
            nodes = [node for node, depth in enumerate(depths_of(parents)) if depth <= len(path)]
        nodes = [node for node in nodes if node not in row.missing]
        place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
    assert result.p is not None and result.q is not None
    columns = [0, *(n + 1 for n in nodes)][: result.limit]
    details = details_of(result.details, slot, nodes, columns, len(emitted), draft.q is not None)
    tokenizer = row.stops.tokenizer
    return Round(
        row=row.index,
        position=start,
        strategy=draft.drafter or None if nodes else None,
        draft=[result.draft[slot][n] for n in nodes],
        p=[result.p[slot][n] for n in nodes],
        q=[result.q[slot][n] for n in nodes] if draft.q is not None else None,
        accepted=len(path),
        bonus=bonus,
        tokens=list(emitted),
        text=tokenizer.decode(emitted, clean_up_tokenization_spaces=False) if tokenizer is not None else None,
        times=took,
        finish_reason=row.finish_reason,
        parents=None if parents is None else [place[parents[n]] for n in nodes],
        path=None if parents is None else [place[n] for n in path],
        details=details,
    )
