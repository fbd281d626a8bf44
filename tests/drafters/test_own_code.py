"""Drafters and acceptance rules of one's own, by `my_module:name`: in Python, in configs and on the command line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import specdec
from specdec.cli import app
from specdec.config import load_yaml
from specdec.decoding.acceptance import LEVIATHAN, MATCH, RULES, AcceptanceRule, find_rule, register_rule
from specdec.drafters import DraftRequest, make_drafters
from specdec.errors import SpecdecError
from specdec.files import own_code
from specdec.research.ablation import build_table, load_ablation, run_ablation, summarise
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "own_drafter.yaml"
PROMPT = "for name in sorted(names):\n    print(name)\nfor value in sorted("
DRAFTER = """
class Echo:
    name = "echo"

    def __init__(self, n_max: int = 2, greeting: str = "hi"):
        self.n_max, self.greeting = n_max, greeting

    def begin(self, row, prompt): pass
    def accept(self, row, n_accepted, is_other): pass

    def draft(self, requests):
        import specdec
        return [specdec.Draft([r.last] * r.limit(self.n_max)) for r in requests]

def careful(eps: float = 0.3, words: str = "a"):
    from specdec.decoding.acceptance import LEVIATHAN
    from dataclasses import replace
    if eps > 1:
        raise ValueError("eps is a probability")
    return replace(LEVIATHAN, name="x", lossy=True)

class NoDrafter: pass
plain_value = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the module `echoing`, which nothing else has imported."""
    monkeypatch.setattr(own_code, "_FOLDERS", [])
    monkeypatch.setattr("specdec.decoding.acceptance.RULES", dict(RULES))
    (tmp_path / "echoing.py").write_text(DRAFTER)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("echoing", "broken", "half"):
            del sys.modules[name]


def test_names_are_split_from_options_by_one_parser() -> None:
    known = ("suffix", "prompt-lookup")
    for text, name, options in (
        ("suffix", "suffix", {}),
        ("suffix:n_max=3:x=[1, a]", "suffix", {"n_max": 3, "x": [1, "a"]}),
        ("pack.module:Name", "pack.module:Name", {}),
        ("module:Name:n_max=3:y=off", "module:Name", {"n_max": 3, "y": False}),
    ):
        assert own_code.parse_name(text, known, "strategy") == (name, options)
    for text in ("suffix:n_max", "prompt-lookup:7", "module:Name:n_max", "not-known:n_max"):
        with pytest.raises(SpecdecError, match="expected key=value"):
            own_code.parse_name(text, known, "strategy")


def test_a_class_of_ones_own_is_a_strategy(folder: Path) -> None:
    own_code.search_folder(folder)
    [first, second] = make_drafters("echoing:Echo:n_max=3, echoing:Echo", False)
    request = [DraftRequest(0, [1], 5)]
    assert [list(d.draft(request)[0].tokens) for d in (first, second)] == [[5, 5, 5], [5, 5]]
    [third] = make_drafters([{"name": "echoing:Echo", "n_max": 1, "greeting": "oh"}], False)
    assert list(third.draft(request)[0].tokens) == [5]
    assert sys.path.count(str(folder)) == 0  # searched for the import alone


def test_decoding_with_an_own_drafter_and_rule_gives_plain_text(folder: Path) -> None:
    own_code.search_folder(folder)
    decoder = specdec.SpeculativeDecoder.from_pretrained("demo-target")
    plain = decoder.generate(PROMPT, 12, strategies=[])
    out = decoder.generate(PROMPT, 12, strategies=["echoing:Echo:n_max=3"])
    assert out.token_ids == plain.token_ids
    assert out.stats.to_dict()["strategies"]["echo"]["draft_tokens"] > 0
    lossy = decoder.generate(PROMPT, 4, strategies=["echoing:Echo"], acceptance="echoing:careful:eps=0.1")
    assert lossy.lossy


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ("echo_ing:Echo", ("no module 'echo_ing'", "'echoing'")),
        ("echoing:Ecko", ("echoing.py has no 'Ecko'", "'Echo'")),
        ("echoing:Echo:nmax=3", ("option of strategy 'echoing:Echo'", "'nmax'", "'n_max'")),
        ("echoing:NoDrafter", ("is not a drafter", "no name, begin, draft, accept")),
        ("echoing:plain_value", ("is not a drafter", "got 3")),
        ("promptlookup", ("unknown strategy", "'prompt-lookup'")),
        ("half:Echo", ("cannot be imported", "no_such_package")),
        ("broken:Echo", ("cannot be imported", "ZeroDivisionError")),
        ({"name": "not-a-module:Echo"}, ("is not the name of a module",)),
    ],
    ids=str,
)
def test_what_is_no_strategy_is_said_in_words(folder: Path, strategy: Any, parts: tuple[str, ...]) -> None:
    (folder / "half.py").write_text("import no_such_package")
    (folder / "broken.py").write_text("1 / 0")
    own_code.search_folder(folder)
    with pytest.raises(SpecdecError) as caught:
        make_drafters([strategy], False)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        ("matsch", ("unknown acceptance rule", "'match'")),
        ("match:eps=0.3", ("'match' has no options", "eps")),
        ("echoing:carefull", ("has no 'carefull'", "'careful'")),
        ("echoing:careful:epsilon=1", ("'epsilon'", "'eps'")),
        ("echoing:careful:eps=2", ("ValueError", "eps is a probability")),
        ("echoing:NoDrafter", ("is not a rule", "NoDrafter")),
        ("echoing:plain_value", ("is not a rule", "got 3")),
        (3, ("got 3",)),
    ],
    ids=str,
)
def test_what_is_no_rule_is_said_in_words(folder: Path, rule: Any, parts: tuple[str, ...]) -> None:
    own_code.search_folder(folder)
    with pytest.raises(SpecdecError) as caught:
        find_rule(rule)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_rule_with_parameters_carries_them_in_its_name(folder: Path) -> None:
    @register_rule
    def typical(eps: float = 0.3, kind: str = "top", deep: bool = False) -> AcceptanceRule:
        return AcceptanceRule("anything", "sample", LEVIATHAN.accepts, LEVIATHAN.next_token, lossy=True)

    assert find_rule("typical").name == "typical:eps=0.3:kind=top:deep=false"
    assert find_rule("typical:deep=true:eps=0.1").name == "typical:eps=0.1:kind=top:deep=true"
    assert find_rule("typical:eps=0.3") is find_rule("typical")  # so that recorded passes can be used again
    assert find_rule(find_rule("typical").name) is find_rule("typical")
    own_code.search_folder(folder)
    assert find_rule("echoing:careful:eps=0.1").name == "echoing:careful:eps=0.1:words=a"


def test_whether_the_text_is_plain_decodings_is_a_property_of_the_rule(folder: Path) -> None:
    own_code.search_folder(folder)
    for name, sampled, greedy in (
        ("match", True, True), ("coupled", True, True), ("leviathan", False, True), ("echoing:careful", False, False),
    ):  # fmt: skip
        assert (find_rule(name).keeps_text(False), find_rule(name).keeps_text(True)) == (sampled, greedy)
    assert not AcceptanceRule("new", "argmax", MATCH.accepts, MATCH.next_token).keeps_text(greedy=False)


def test_two_files_of_one_name_are_not_mixed_up(folder: Path) -> None:
    own_code.search_folder(folder)
    make_drafters("echoing:Echo", False)
    other = folder / "other"
    other.mkdir()
    (other / "echoing.py").write_text("")
    own_code.search_folder(other)
    with pytest.raises(SpecdecError, match="rename the file"):
        make_drafters("echoing:Echo", False)


def test_a_config_finds_the_file_beside_it_and_the_command_line_that_of_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "configs").mkdir()
    (folder / "echoing.py").rename(folder / "configs" / "echoing.py")
    text = "pair: {target: demo-target}\nstrategies: ['echoing:Echo']\ngeneration: {max_new_tokens: 4}\nprompts: [a]\n"
    (folder / "configs" / "run.yaml").write_text(text)
    with pytest.raises(SpecdecError, match="no module 'echoing'"):
        make_drafters("echoing:Echo", False)
    assert [d.name for d in make_drafters(load_yaml(folder / "configs" / "run.yaml").strategies, False)] == ["echo"]
    monkeypatch.chdir(folder / "configs")
    typed = ["--prompt", PROMPT, "--strategies", "echoing:Echo:n_max=1", "--acceptance", "echoing:careful", "--json"]
    done = CliRunner().invoke(app, ["generate", "--target", "demo-target", "--max-new-tokens", "4", *typed])
    assert done.exit_code == 0, done.output
    assert "echo" in json.loads(done.stdout)["stats"]["strategies"]


@pytest.mark.fast(1)
def test_the_config_with_an_own_drafter_runs(tmp_path: Path) -> None:
    config = load_ablation(CONFIG)
    assert len([cell for cell in config.expand() if cell.strategies]) == 5
    assert config.prompts is not None
    shorter = {"generation": {"max_new_tokens": 8}, "prompts": config.prompts[1:], "warm_up_tokens": 0}
    run_ablation(replace(config, **shorter), tmp_path)
    summary = summarise(build_table(tmp_path)[0])
    assert summary["gate"]["passed"]
    assert summary["gate"]["compared"] == 3
    assert not summary["errors"]
    [lossy] = summary["gate"]["lossy"]
    assert "own_drafter:near_best:share=0.3" in lossy
    assert all(s["acceptance"]["value"] > 0 for s in summary["settings"].values() if s["drafts"])


def test_a_changed_file_is_a_changed_ablation(folder: Path) -> None:
    text = (
        "pairs: {a: {target: demo-target}}\nstrategies: {echo: ['echoing:Echo']}\nprompts: [a b a b]\n"
        "generation: {max_new_tokens: 2}\n"
    )
    (folder / "grid.yaml").write_text(text)
    run_ablation(load_ablation(folder / "grid.yaml"), folder / "out")
    (folder / "echoing.py").write_text(DRAFTER + "\n# changed\n")
    with pytest.raises(SpecdecError, match="the file of echoing:Echo changed"):
        run_ablation(load_ablation(folder / "grid.yaml"), folder / "out")


def test_the_example_of_the_architecture_page_decodes() -> None:
    page = (CONFIG.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code.replace("(4, 12)", "(0, 2)"), "architecture.md", "exec"), scope)
    model = tiny_model("llama")
    decoder = specdec.SpeculativeDecoder(model, check=False)
    out = decoder.generate([[1, 2, 3], [4, 5]], 8, strategies=[scope["TwoLayers"]()])
    assert out.token_ids == [oracle_greedy(model, prompt, 8) for prompt in ([1, 2, 3], [4, 5])]
    assert out.stats.draft_tokens > 0
