"""What Linux says of the processor."""

from __future__ import annotations

from pathlib import Path


def processor_fields() -> dict[str, str]:
    """Return the fields of the first processor ("vendor_id", "model name", ...); none where the system has no such
    file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
