"""REST: trees from a corpus against counting by brute force, the files of a corpus, and plain decoding's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import DraftRequest, SpecdecError, SpeculativeDecoder, SuffixStore
from specdec.drafters.base import Draft, DraftContext
from specdec.drafters.corpus import documents
from specdec.drafters.rest import Rest
from specdec.models.trees import depths_of, path_to
from tests.helpers.playing import check_counts, quoting_ids, random_ids
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level
from tests.oracle import oracle_greedy

PROMPTS = [quoting_ids(20, 1), [9, 8], [7]]


def counted(texts: list[list[int]], row: list[int], n_max: int, depth: int) -> dict[tuple[int, ...], int]:
    """How often each prefix followed the longest agreeing context, by looking at every place of every text."""
    for n in range(min(depth, len(row)), 0, -1):
        found = [t[i + n :][:n_max] for t in texts for i in range(len(t) - n) if t[i : i + n] == row[-n:]]
        if found:
            prefixes = [tuple(f[:k]) for f in found for k in range(1, len(f) + 1)]
            return {p: prefixes.count(p) for p in prefixes}
    return {}


def drafted(drafter: Rest, row: list[int], n_max: int = 0) -> Draft:
    [draft] = drafter.draft([DraftRequest(0, row[:-1], row[-1], n_max, len(row) - 1)])
    return draft


def differences(seed: int) -> int:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 4, int(n)).tolist() for n in rng.integers(2, 60, 6)]
    drafter = Rest(store=SuffixStore(texts), nodes=12, n_max=4, depth=5).fresh(DraftContext(1, 100, 4))
    wrong = 0
    for _ in range(30):
        row = rng.integers(0, 5, int(rng.integers(1, 12))).tolist()
        draft, expected = drafted(drafter, row), counted(texts, row, 4, 5)
        tokens, parents = list(draft.tokens), list(draft.parents or [])
        paths = [tuple(tokens[i] for i in path_to(parents, node)) for node in range(len(tokens))]
        best = sorted(expected.values(), reverse=True)[:12]
        is_sound = len(set(paths)) == len(paths) and depths_of(parents) == sorted(depths_of(parents))
        wrong += sorted((expected.get(p, 0) for p in paths), reverse=True) != best or not is_sound
    return wrong


def test_trees_hold_the_most_frequent_continuations_of_the_longest_context() -> None:
    assert sum(differences(seed) for seed in range(5)) == 0


@pytest.mark.parametrize("fault", ["shortest", "unsorted"])
def test_a_wrong_count_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "shortest":
        monkeypatch.setattr("specdec.drafters.rest.SuffixIndex.agreement", lambda self, p, q: np.ones(len(p), int))
    else:
        monkeypatch.setattr("specdec.drafters.rest.SuffixIndex.successors", lambda self, p, n: np.zeros((len(p), n)))
    assert sum(differences(seed) for seed in range(5)) > 0


def test_limits_of_a_draft() -> None:
    drafter = Rest(store=SuffixStore([[1, 2, 3, 4, 5, 6]]), min_match=2).fresh(DraftContext(1, 100, 9))
    assert list(drafted(drafter, [1, 2], 3).tokens) == [3, 4, 5]
    assert len(drafted(drafter, [9, 2])) == 0  # one token agrees, two must
    assert len(drafted(drafter, [5, 6])) == 0  # nothing follows


@pytest.mark.parametrize("batch", [1, 2])
def test_text_is_plain_decodings(batch: int) -> None:
    model = tiny_model("llama")
    expected = [oracle_greedy(model, p, 16) for p in PROMPTS]
    store = SuffixStore([[*p, *e[:9], 1, *e[9:]] for p, e in zip(PROMPTS, expected, strict=True)] + [random_ids(50)])
    decoder = SpeculativeDecoder(model, check=False)
    out = decoder.generate(PROMPTS, 16, strategies=[Rest(store=store), "prompt-lookup"], batch_size=batch)
    assert out.token_ids == expected
    check_counts(out)
    assert out.stats.tokens_per_round > 2
    sampled: dict[str, Any] = {"temperature": 0.7, "seed": 5, "batch_size": batch}
    plain = decoder.generate(PROMPTS, 8, strategies=[], **sampled)
    assert decoder.generate(PROMPTS, 8, strategies=[Rest(store=store)], **sampled).token_ids == plain.token_ids


# -- the files of a corpus ---------------------------------------------------------------------------------------------


def test_files_of_texts_and_ids_are_read(tmp_path: Path) -> None:
    lines = ["two", [3, 4], {"prompt": "p", "answer": "a"}, {"turns": ["x", "y"]}, {"messages": [{"content": "m"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "b.json").write_text(json.dumps(lines))
    assert list(documents(tmp_path / "a.jsonl")) == ["two", [3, 4], "p", "a", "x", "y", "m"]
    assert list(documents(tmp_path / "b.json")) == ["two", [3, 4], "p", "a", "x", "y", "m"]
    (tmp_path / "c.txt").write_text("whole\nfile")
    assert list(documents(tmp_path / "c.txt")) == ["whole\nfile"]
    np.save(tmp_path / "d.npy", np.array([5, 6, 7], dtype=np.int32))
    assert [d.tolist() for d in documents(tmp_path / "d.npy")] == [[5, 6, 7]]  # type: ignore[union-attr]


def test_a_corpus_by_name_helps_and_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_model("llama", vocab=320), byte_level()
    plain = SpeculativeDecoder(model, tokenizer=tokenizer, check=False).generate([[50, 51]], 12, strategies=[])
    (tmp_path / "text.txt").write_text("the quick brown fox")
    (tmp_path / "ids.json").write_text(json.dumps([50, 51, *plain.token_ids[0]]))
    monkeypatch.chdir(tmp_path)
    decoder = SpeculativeDecoder(model, tokenizer=tokenizer, check=False)
    chain = ["rest:corpus=[text.txt, ids.json]"]
    out = decoder.generate([[50, 51]], 12, strategies=chain)
    assert out.token_ids == plain.token_ids
    assert out.stats.rounds < 6
    monkeypatch.setattr("specdec.drafters.corpus.documents", lambda path: pytest.fail("read again"))
    assert decoder.generate([[50, 51]], 12, strategies=chain).token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.json", "[1.5]", "expected texts"),
        ("a.npy", "no", "no array"),
        ("a.npy", "\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'shape': (3,", "a.npy is no array of numpy's, or damaged"),
        ("a.jsonl", "", "a.jsonl: the corpus is empty"),
        ("a.txt", "text", "no tokenizer"),
        ("a.json", "[500]", "the id 500, the target only 128 ids"),
    ],
)
def test_files_that_are_no_corpus_are_refused(tmp_path: Path, file: str, content: str, message: str) -> None:
    (tmp_path / file).write_text(content, encoding="latin-1")
    with pytest.raises(SpecdecError, match=message):
        Rest(corpus=str(tmp_path / file)).fresh(DraftContext(1, 64, 128))


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "needs a datastore"), ({"corpus": "no"}, "not found"), ({"corpus": "x", "nodes": 512}, "nodes=512"),
     ({"corpus": "x", "n_max": 0}, "rest: n_max"), ({"store": 3}, "must be a SuffixStore")],
)  # fmt: skip
def test_bad_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        Rest(**options).fresh(DraftContext(1, 64, 128))
