"""From logits to the target's distribution, and the random numbers that sample it."""

from specdec.sampling.sampling import (
    OWN_FIELDS,
    TEXT_FIELDS,
    WARPER_FIELDS,
    Purpose,
    Sampling,
    best,
    build_sampling,
    exponential,
    fold,
    fold_int,
    race,
    row_key,
    streams,
    uniform,
)

__all__ = [
    "OWN_FIELDS", "TEXT_FIELDS", "WARPER_FIELDS", "Purpose", "Sampling", "best", "build_sampling", "exponential",
    "fold", "fold_int", "race", "row_key", "streams", "uniform",
]  # fmt: skip
