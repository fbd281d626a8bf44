"""Prometheus metrics under vLLM's names, so that its dashboards and benchmark clients read them (docs/serving.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from specdec.stats import RoundRecord, Tally

disable_created_metrics()  # a second line for each counter that nothing here reads
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that were taken.",
    "generation_tokens": "Tokens of texts.",
    "spec_decode_num_drafts": "Rounds with a draft.",
    "spec_decode_num_draft_tokens": "Drafted tokens.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
}
GAUGES = {"num_requests_running": "Texts in batch slots.", "num_requests_waiting": "Texts that wait for a slot."}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request to the first token of a text.",
    "e2e_request_latency_seconds": "From a request to the end of a text.",
    "request_queue_time_seconds": "From a request to the slot of a text.",
    "request_time_per_output_token_seconds": "Of a text after its first token.",
}


@dataclass
class Timing:
    """When a text was asked for and had its first token, in seconds of `time.perf_counter`."""

    asked: float
    first: float | None = None


class Metrics:
    """The metrics of one server, in a registry of their own. One thread writes."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        labels = ("model_name",)
        self.model = model

        def one(kind: Any, name: str, text: str, **more: Sequence[float]) -> Any:
            return kind(name, text, labels, registry=self.registry, **more).labels(model)

        self.counts = {name: one(Counter, f"vllm:{name}", text) for name, text in COUNTERS.items()}
        self.gauges = {name: one(Gauge, f"vllm:{name}", text) for name, text in GAUGES.items()}
        self.times = {name: one(Histogram, f"vllm:{name}", text, buckets=SECONDS) for name, text in HISTOGRAMS.items()}
        self.passes = one(Counter, "specdec:verify_passes", "Passes of the target, prefill apart.")
        self.per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted the drafted token of a position.",
            (*labels, "position"),
            registry=self.registry,
        )
        self.ended = Counter(
            "vllm:request_success", "Texts that have ended.", (*labels, "finished_reason"), registry=self.registry
        )

    def count(self, name: str, by: float = 1) -> None:
        self.counts[name].inc(by)

    def rounds(self, records: Sequence[RoundRecord]) -> None:
        """Count rounds that have ended."""
        tally = Tally.of(records)
        self.count("generation_tokens", tally.generated_tokens)
        self.count("spec_decode_num_drafts", tally.drafted_rounds)
        self.count("spec_decode_num_draft_tokens", tally.draft_tokens)
        self.count("spec_decode_num_accepted_tokens", tally.accepted_tokens)
        for i in range(max((r.accepted for r in records), default=0)):
            self.per_position.labels(self.model, str(i)).inc(sum(r.accepted > i for r in records))

    def started(self, timing: Timing) -> None:
        """Note that a text has got its slot."""
        self.times["request_queue_time_seconds"].observe(time.perf_counter() - timing.asked)

    def progressed(self, timing: Timing) -> None:
        """Note that a text has tokens."""
        if timing.first is None:
            timing.first = time.perf_counter()
            self.times["time_to_first_token_seconds"].observe(timing.first - timing.asked)

    def finished(self, timing: Timing, reason: str, tokens: int) -> None:
        """Note the end of a text; reason: as OpenAI has it, or `abort` or `error`."""
        now = time.perf_counter()
        self.ended.labels(self.model, reason).inc()
        self.times["e2e_request_latency_seconds"].observe(now - timing.asked)
        if timing.first is not None and tokens > 1:
            self.times["request_time_per_output_token_seconds"].observe((now - timing.first) / (tokens - 1))

    def page(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)
