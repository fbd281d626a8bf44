"""A call whose prompts come while it runs: what a server, or any other source without an end, decodes with.

    with decoder.live(slots=8, temperature=0.8, acceptance="match") as call:
        row = call.add(ids, seed=1, max_new_tokens=64)
        while row.finish_reason is None:
            call.step()

A row's tokens are those of `generate` with its prompt alone and its seed: keys belong to rows, and nothing of a row
depends on its neighbours (docs/architecture.md, invariant 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specdec.config import MOST_ROWS, UNSET, as_list, check_seed, check_switch, check_whole
from specdec.decoding.call import Call
from specdec.decoding.prompts import encode_prompts
from specdec.decoding.row import Row
from specdec.device.memory import is_out_of_memory
from specdec.errors import SpecdecError
from specdec.sampling.constraints import PrefixProcessor
from specdec.sampling.sampling import row_key


class LiveCall:
    """One call with `slots` rows at a time, each of up to `capacity` tokens, prompt and output together.

    rows: those that wait or run, oldest first
    Not for several threads at once.
    """

    def __init__(self, call: Call, slots: int, capacity: int):
        self.capacity = min(capacity, call.decoder.target.context)
        call.batch, call.capacity = slots, self.capacity
        self.call, self.rows = call.__enter__(), call.rows
        self.passes = call.run()

    def __enter__(self) -> LiveCall:
        return self

    def __exit__(self, *error: Any) -> None:
        with self.call.decoder.working():
            self.call.__exit__(*error)

    @property
    def slots(self) -> int:
        return self.call.batch

    @property
    def free(self) -> int:
        """Slots that the next rows could have at once."""
        return max(0, self.slots - len(self.rows))

    @property
    def verify_passes(self) -> int:
        """Passes of the target so far, prefill apart."""
        return self.call.engine.verifier.passes

    def add(
        self,
        prompt: Any,
        seed: int,
        index: int = 0,
        max_new_tokens: int | None = None,
        stop_strings: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Row:
        """Queue a prompt; returns its row, which ends when its `finish_reason` is set.

        prompt: one, in any form that `generate` takes
        seed, index: the row's random numbers are those of row `index` of a call with this seed
        max_new_tokens: most tokens of the output; None: as the call says
        stop_strings: beside those of the call
        Raises SpecdecError for what `generate` refuses, for a prompt that does not fit into a slot, and for a closed
        call.
        """
        self._check_open()
        target, tokenizer, known = self.call.decoder.target, self.call.decoder.tokenizer, self.call.settings
        ids = encode_prompts([prompt], tokenizer, target.vocab_size, target.context, ["the prompt"])[0]
        if len(ids) > self.capacity:
            raise SpecdecError(f"the prompt has {len(ids)} tokens; a slot has room for 1 to {self.capacity}")
        check_seed(seed, "an int")
        check_whole("index", index, 0)
        check_switch("ignore_eos", ignore_eos)
        settings = replace(
            known,
            max_new_tokens=known.max_new_tokens if max_new_tokens is None else max_new_tokens,
            ignore_eos=ignore_eos or known.ignore_eos,
            stop_strings=[*known.stops, *as_list(stop_strings)],
        )
        settings.check()
        stops = replace(self.call.stop_rules(settings), context=self.capacity)
        row = Row(index, ids, row_key(seed, index), stops)
        if row.finish_reason is None:
            self.rows.append(row)
            self.call.engine.queue.append(row)
        return row

    def step(self) -> None:
        """Admit rows to free slots, and run one pass over all that run. Without rows nothing happens.

        Raises what a pass raises; the call must then be closed. A closed call raises SpecdecError.
        """
        self._check_open()
        try:
            if self.rows and next(self.passes, None) is None:  # the loop had run out of rows before these came
                self.passes = self.call.run()
                next(self.passes, None)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                self.__exit__(type(error), error, error.__traceback__)
            raise
        self.rows[:] = [row for row in self.rows if row.finish_reason is None]

    def cancel(self, row: Row) -> None:
        """End a row with reason `interrupted`. Its slot is free for the next one."""
        self._check_open()
        if row.finish_reason is None:
            self.call.engine.cancel(row)
            self.rows[:] = [other for other in self.rows if other is not row]

    def close(self) -> None:
        """End the call, if it is open, and give its memory back. Rows that have not ended stay as they are."""
        self.__exit__(None, None, None)

    def _check_open(self) -> None:
        if not self.call.is_open:
            raise SpecdecError("the call is closed: open another with `live`")


OF_ROWS = ("seed", "num_return_sequences", "batch_size", "keep_state", "shard")


def check_live(options: dict[str, Any], slots: int, capacity: int | None) -> None:
    """Raise SpecdecError for what has no meaning in a call whose prompts come while it runs."""
    for name in OF_ROWS:
        if options.get(name, UNSET) is not UNSET:
            raise SpecdecError(f"{name} has no effect on a live call: seeds are given to `add`, and slots to `live`")
    if not all(isinstance(p, PrefixProcessor) for p in as_list(options.get("logits_processor"))):
        raise SpecdecError(
            "a live call takes constraints and grammars as logits_processor, and none that may know its row"
        )
    check_whole("slots", slots, 1, MOST_ROWS)
    if capacity is not None:
        check_whole("capacity", capacity, 1)
