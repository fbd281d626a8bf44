"""Running out of memory: one line with the numbers and what would fit, and nothing of the failed work is kept."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from specdec.errors import SpecdecError

UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "_ALLOC_FAILED")  # as torch's libraries say it
ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]?i?B)\b", re.IGNORECASE)


class OutOfMemoryError(SpecdecError, torch.OutOfMemoryError):
    """What would not fit, with numbers. A SpecdecError, and torch's own error as well, for those who catch that."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an error says that memory is used up, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def bytes_asked(error: BaseException) -> int | None:
    """The bytes that an allocation asked for; None: the error does not say."""
    found = ASKED.search(str(error))
    if found is None:
        return None
    unit = found[2].upper()
    return int(float(found[1]) * UNITS["B" if unit == "BYTES" else unit if "I" in unit else unit.replace("B", "IB")])


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """(free, all) bytes of a device, those that torch holds and does not use counted as free; None: unknown."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), whole
    with suppress(OSError, LookupError, ValueError):  # a system of another kind
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        lines = dict(line.split(":") for line in text.splitlines())
        free, whole = (int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
        return free, whole
    return None


def size(count: float) -> str:
    """Bytes for people."""
    for unit, part in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= part:
            return f"{count / part:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"


def numbers(error: BaseException, device: torch.device, known: tuple[int, int] | None) -> str:
    """What was asked for, and what was free by `known`, in words."""
    asked = bytes_asked(error)
    said = [f"{size(asked)} were asked for"] if asked is not None else []
    said += [f"{size(known[0])} of {size(known[1])} were free"] if known is not None else []
    return f"out of memory on {device}" + (f": {' and '.join(said)}" if said else "")


def forget(error: BaseException) -> None:
    """Let go of the tensors that the frames of an error hold, and of memory that torch keeps for later."""
    seen: BaseException | None = error
    while seen is not None:
        trace = seen.__traceback__
        traceback.clear_frames(trace)
        while trace is not None:  # a frame without its variables still holds its function, and that what it closes over
            trace.tb_next, trace = None, trace.tb_next
        seen.__traceback__, seen = None, seen.__context__
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def explaining(device: torch.device, rest: Callable[[int | None, int | None], str]) -> Iterator[None]:
    """Turn an error of memory into one line: the numbers, and `rest` of what was asked for and what is free once the
    failed work is let go of (bytes; None: unknown)."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        asked, said = bytes_asked(error), numbers(error, device, memory_of(device))
        forget(error)
        after = memory_of(device)
        raise OutOfMemoryError(f"{said}; {rest(asked, None if after is None else after[0])}") from None
