"""Prompts shared among processes: each row is what it is in the whole call."""

from __future__ import annotations

from typing import Any

import pytest

import specdec
from specdec import SpecdecError
from specdec.research.traces.trace import record
from tests.helpers.tiny import tiny_model

PROMPTS = [[i + 1, i + 2, i + 3] * (i + 1) for i in range(5)]


@pytest.fixture(scope="module")
def decoder() -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder(tiny_model("llama"), strategies=["prompt-lookup"], check=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0, "num_return_sequences": 2, "acceptance": "match"}, {"temperature": 1.0, "exact": True}],
)
def test_parts_are_rows_of_the_whole_call(decoder: specdec.SpeculativeDecoder, options: dict[str, Any]) -> None:
    whole = decoder.generate(PROMPTS, 10, **options)
    assert [row.index for row in whole] == list(range(len(whole)))
    found: dict[int, specdec.GenerationRow] = {}
    for part in ("0/3", "1/3", "2/3"):
        out = decoder.generate(PROMPTS, 10, shard=part, **options)
        assert len(out.provenance["prompts"]) == len(out.provenance["chat_templates"]) == len(out)
        found |= {row.index: row for row in out}
        # Passes of fixed shape have the whole call's: another batch is another kernel.
        assert (out.provenance["batch"] == whole.provenance["batch"]) is ("exact" in options)
    assert {i: found[i].token_ids for i in sorted(found)} == dict(enumerate(whole.token_ids))


def test_a_part_without_prompts_is_empty(decoder: specdec.SpeculativeDecoder) -> None:
    assert len(decoder.generate(PROMPTS[:1], 4, shard="1/2")) == 0


def test_a_trace_is_of_a_whole_call(decoder: specdec.SpeculativeDecoder) -> None:
    with pytest.raises(SpecdecError, match="shard: a trace is of all prompts"):
        record(decoder, PROMPTS, 4, shard="0/2")


@pytest.mark.parametrize("text", ["2/2", "1", "a/b", 3, "-1/2"])
def test_other_forms_are_refused(decoder: specdec.SpeculativeDecoder, text: Any) -> None:
    with pytest.raises(SpecdecError, match="expected index/count"):
        decoder.generate(PROMPTS, 4, shard=text)
