"""What llama.cpp's strategies have in common here: parity switches, and what is known of a row from round to round.

*Parity switches*: a strategy does what llama.cpp does, oddities included, unless a field `fix_...` is true. A field
left None follows `parity`: `parity=False` turns on all fixes that are not named.

*State between rows*: llama.cpp's strategies continue with what an earlier text left in their slot. In a decoder's call
what they know ends with each row, because a row's drafts, and under `leviathan` its text, must not depend on its
neighbours. `shared` asks for upstream's behaviour; a chain without a decoder (`DraftContext.separate` False) has it
always.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from specdec.drafters.base import DraftContext, RowDrafter

MOST = 1024  # n-gram or draft, as upstream


@dataclass
class ParityDrafter(RowDrafter):
    """Base of llama.cpp's strategies, which have the fields `parity`, `shared` and any number of `fix_...`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in [f.name for f in fields(self) if f.name.startswith("fix_")]:
            if getattr(self, name) is None:
                setattr(self, name, not self.parity)  # type: ignore[attr-defined]
        self._rows: dict[int, Any] = {}  # by slot
        self._separate = False

    def fresh(self, context: DraftContext) -> Any:
        """Make a drafter for one call, with the state by slot of the call before if rows share it."""
        made = super().fresh(context)
        made._separate = context.separate and not self.shares_state
        before = None if made._separate else self.inherited(context)
        made._rows = before._rows if before is not None else {}
        return made
