"""transformers' loading bars, switched off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as bars


@contextmanager
def without_bars() -> Iterator[None]:
    """Switch transformers' progress bars off, and afterwards on again if they were on."""
    were_on, hub_off = bars.is_progress_bar_enabled(), are_progress_bars_disabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            bars.enable_progress_bar()
        if not hub_off:
            enable_progress_bars()
        elif were_on:
            disable_progress_bars()
