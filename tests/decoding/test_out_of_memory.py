"""Memory that runs out, at load, in a prefill, a draft, a verify pass or a recording: a line with numbers and what
would fit, and a decoder that works afterwards."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec import SpecdecError, SpeculativeDecoder, load_pair
from specdec.decoding import verification
from specdec.device import memory
from specdec.device.memory import OutOfMemoryError, bytes_asked, is_out_of_memory, size
from specdec.drafters.draft_model import core
from specdec.models.kv_cache import RaggedLayer
from specdec.models.runner import Runner
from specdec.research.traces.trace import record
from tests.cli.test_cli import refused
from tests.helpers.grid import save_model
from tests.helpers.playing import quoting_ids, weaker
from tests.helpers.recording import Rerun
from tests.helpers.tiny import tiny_model

PROMPTS = [quoting_ids(n, seed) for seed, n in enumerate((19, 24, 30, 21))]
NEW = 12
FULL = pytest.mark.full
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is "
    "free. See documentation for Memory Management\n(https://pytorch.org/docs)"
)


def fails(as_on_a_gpu: bool) -> None:
    """Run out of memory as a GPU does, or really."""
    if as_on_a_gpu:
        raise torch.OutOfMemoryError(CUDA)
    torch.empty(1 << 55, dtype=torch.uint8)


@pytest.fixture
def decoder() -> SpeculativeDecoder:
    target = tiny_model("llama", num_hidden_layers=2)
    return SpeculativeDecoder(target, weaker(target, 0.02), strategies=["draft-model:n_max=3"], check=False)


Spoil = Callable[[pytest.MonkeyPatch, bool], None]


def in_allocation(of_draft: bool) -> Spoil:
    """The keys and values of four rows do not fit: the target's, or the draft's."""

    def spoil(patch: pytest.MonkeyPatch, gpu: bool) -> None:
        original, seen = RaggedLayer.lazy_initialization, set[int]()

        def allocate(self: Any, *states: Any) -> None:
            seen.add(id(self))
            if self.batch > 2 and len(seen) > (2 if of_draft else 0):
                fails(gpu)
            original(self, *states)

        patch.setattr(RaggedLayer, "lazy_initialization", allocate)

    return spoil


def in_call(owner: Any, name: str, at: int) -> Spoil:
    """The work of the call number `at` of a function does not fit, if four rows take part."""

    def spoil(patch: pytest.MonkeyPatch, gpu: bool) -> None:
        original, calls = getattr(owner, name), []

        def work(self: Any, *given: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == at:
                fails(gpu)
            return original(self, *given, **options)

        patch.setattr(owner, name, work)

    return spoil


PLACES: dict[str, tuple[Spoil, str]] = {
    "the target's cache": (in_allocation(False), "prefill"),
    "the draft's cache": (in_allocation(True), "(prefill|draft)"),
    "a verify pass": (in_call(verification.Verifier, "launch", 2), "verify"),
    "a draft": (in_call(core.DraftCore, "steps", 2), "draft"),
}


@pytest.mark.parametrize("gpu", [pytest.param(True, id="as on a GPU"), pytest.param(False, id="on a CPU", marks=FULL)])
@pytest.mark.parametrize("place", PLACES)
def test_a_call_says_a_line_and_the_next_one_works(
    decoder: SpeculativeDecoder, place: str, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decoder.generate(PROMPTS, NEW, batch_size=2).token_ids
    spoil, phase = PLACES[place]
    caches: list[Any] = []
    lease = Runner.lease

    def leased(self: Any, *given: Any) -> Any:
        made = lease(self, *given)
        caches.append(weakref.ref(made))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "lease", leased)
        spoil(patch, gpu)
        with pytest.raises(OutOfMemoryError) as error:
            decoder.generate(PROMPTS, NEW, batch_size=4)
        said = str(error.value)
        assert "\n" not in said
        assert ("2.5 GiB" if gpu else f"{1 << 25:.1f} GiB") + " were asked for and " in said
        for part in (
            "were free; this was in ",
            "weights take ",
            "keys and values of 4 rows of 42 tokens",
            "batch_size=",
        ):
            assert part in said
        assert re.search(f"this was in {phase};", said), said
        assert caches
        assert [cache() for cache in caches] == [None] * len(caches)  # although the error is still held
    assert decoder.target.pool.idle is None
    assert decoder.generate(PROMPTS, NEW, batch_size=2).token_ids == expected
    assert decoder.generate(PROMPTS, NEW, batch_size=4).token_ids == expected


@pytest.mark.parametrize("way", ["stream", "rounds", "live", "record"])
def test_every_kind_of_call_says_it(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model("llama", num_hidden_layers=2)
    decoder = SpeculativeDecoder(target, strategies=["prompt-lookup"], check=False)
    expected = decoder.generate(PROMPTS[:1], NEW).token_ids[0]

    def live() -> None:
        call = decoder.live(slots=2)
        call.add(PROMPTS[0], seed=0, max_new_tokens=NEW)
        for _ in range(4):
            call.step()

    ways: dict[str, Callable[[], Any]] = {
        "stream": lambda: list(decoder.stream(PROMPTS[0], NEW)),
        "rounds": lambda: list(decoder.rounds(PROMPTS[0], NEW)),
        "live": live,
        "record": lambda: record(decoder, PROMPTS[:1], NEW),
    }
    decoder.tokenizer = SimpleNamespace(decode=lambda ids, **options: "a" * len(ids)) if way == "stream" else None
    with monkeypatch.context() as patch:
        in_call(verification.Verifier, "launch", 2)(patch, True)
        with pytest.raises(SpecdecError, match=r"out of memory on cpu: 2\.5 GiB were asked for"):
            ways[way]()
    decoder.tokenizer = None
    assert [t for r in decoder.rounds(PROMPTS[0], NEW) for t in r.tokens] == expected


def test_numbers_decide_what_would_fit(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = sum(model.kv_bytes(4, 42) for model in decoder.report.models)
    monkeypatch.setattr(memory, "memory_of", lambda device: (3 * kept // 4 + 1, 8 * kept))

    def fail(self: Any, *states: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(RaggedLayer, "lazy_initialization", fail)
    with pytest.raises(OutOfMemoryError, match=r"of 4 rows .*: batch_size=3, or 31 tokens a row"):
        decoder.generate(PROMPTS, NEW, batch_size=4)


def test_other_errors_stay_what_they_are(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *given: Any) -> None:
        raise RuntimeError("a kernel is broken")

    monkeypatch.setattr(verification.Verifier, "launch", fail)
    with pytest.raises(RuntimeError, match=r"^a kernel is broken$"):
        decoder.generate(PROMPTS, NEW)


@pytest.mark.parametrize("place", ["reading", "moving"])
def test_a_model_that_does_not_fit_is_refused_in_a_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save_model(tmp_path / "model", num_hidden_layers=1)

    def fail(*given: Any, **options: Any) -> None:
        fails(True)

    with monkeypatch.context() as patch:
        if place == "reading":
            patch.setattr("specdec.models.loading.AutoModelForCausalLM.from_pretrained", fail)
        else:
            patch.setattr("transformers.PreTrainedModel.to", fail)
        said = refused("generate", "--target", name, "--prompt", "a")
        for part in ("2.5 GiB were asked for", f"the weights of target {name} take ", 'dtype="bfloat16"'):
            assert part in said
    assert load_pair(name, device="cpu").target is not None


def test_a_self_test_that_does_not_fit_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    monkeypatch.setattr(RaggedLayer, "lazy_initialization", lambda self, *states: fails(True))
    with pytest.raises(OutOfMemoryError, match="this was in the self-test of the target; weights take"):
        SpeculativeDecoder(model)


def test_a_recording_without_room_runs_eagerly_and_the_next_call_records(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_model("llama", num_hidden_layers=2)
    expected = SpeculativeDecoder(target, strategies=[], check=False).generate(PROMPTS[:2], 4).token_ids
    decoder = SpeculativeDecoder(target, strategies=[], check=False)
    recorder = Rerun()
    decoder.target = Runner(target, recorder=recorder)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "specdec"):
        patch.setattr(recorder, "record", lambda run: fails(True))
        out = decoder.generate(PROMPTS[:2], 4)
    assert out.token_ids == expected
    report = out.provenance["compile"]["target"]
    assert (report["captured"], "failure" in report) == (0, False)
    assert report["no_room"] == len(caplog.records) > 0
    said = caplog.records[0].getMessage()
    assert "Tried to allocate 2.50 GiB" in said
    assert 'compile="off"' in said
    assert "\n" not in said
    out = decoder.generate(PROMPTS[:2], 4, batch_size=1)
    assert out.token_ids == expected
    assert out.provenance["compile"]["target"]["captured"] > 0


def test_errors_of_memory_are_known_by_their_words() -> None:
    assert bytes_asked(RuntimeError(CUDA)) == int(2.5 * 2**30)
    assert bytes_asked(RuntimeError("you tried to allocate 123456 bytes. Error code 12")) == 123456
    assert bytes_asked(MemoryError()) is None
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(None)
    assert [size(n) for n in (5 << 30, 3 << 20, 2048)] == ["5.0 GiB", "3.0 MiB", "2 KiB"]
    with pytest.raises(torch.OutOfMemoryError):
        raise OutOfMemoryError("still torch's")
