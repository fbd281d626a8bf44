"""`specdec bench CONFIG`: fair turns, figures that say what they claim, failures that stay where they happened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from specdec import theory
from specdec.cli import app
from specdec.cli.bench import bench_config
from specdec.research.bench import contenders, figures, passes, run, scenario
from specdec.research.bench.config import Scenario
from specdec.research.bench.contenders import Output, make_contender
from specdec.research.bench.contenders.base import Contender
from specdec.research.bench.contenders.own import Own
from specdec.research.bench.document import without_rows
from specdec.research.bench.pair import Item, Pair
from specdec.research.bench.passes import PassCosts
from specdec.research.models.choice import ModelChoice
from tests.helpers.scripts import load_script

pytestmark = pytest.mark.full  # measurements take their time

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {
    "contenders": {
        "plain": {"kind": "specdec"},
        "draft-model": {"kind": "specdec", "strategies": ["draft-model:n_max=3"]},
        "hf": {"kind": "transformers"},
        "hf-kept": {"kind": "transformers", "cache": "kept"},
        "hf-assisted": {"kind": "transformers", "assistant": True, "assistant_tokens": 3},
        "broken": {"kind": "broken"},
    },
    "data": {"dataset": "humaneval", "longest": 24},
    "scenarios": {
        "one": {"prompts": 2, "max_new_tokens": 7, "repeats": 1, "ignore_eos": True},
        "two": {
            "contenders": ["hf", "plain", "hf-assisted"], "batch": 2, "prompts": 2, "max_new_tokens": 3, "repeats": 1,
        },
    },
    "passes": {"widths": [1, 3], "lengths": [32]},
    "profile": {"rounds": 2, "skip": 1},
    "targets": {
        "drafting": {
            "value": "scenarios/one/draft-model/tokens_per_second", "over": "scenarios/one/hf/tokens_per_second",
            "at_least": 0,
        },
        "faster than nothing": {"value": "scenarios/one/plain/tokens_per_second", "at_least": 0.001},
        "wide pass": {"value": "passes/plain/batch 1, width 3, 32 slots/ms", "at_most": 1e-9},
        "to the broken one": {
            "value": "scenarios/one/plain/tokens_per_second", "over": "scenarios/one/broken/tokens_per_second",
            "at_least": 1,
        },
    },
}  # fmt: skip


@dataclass(frozen=True)
class Nothing:
    """No options."""


class Broken(Contender):
    """A contender that always raises."""

    kind = "broken"
    options_class = Nothing

    def version(self) -> str | None:
        return "0"

    def refuses(self, batch: int) -> str | None:
        return None

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, ignore_eos: bool) -> Output:
        raise ValueError("no such luck\nsecond line")


@pytest.fixture(scope="module", autouse=True)
def _quick_passes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "SECONDS", 0.05)
        patch.setitem(passes.COPY_BYTES, "cpu", 1 << 20)
        yield


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def result(config_file: Path) -> dict[str, Any]:
    """One run of the whole through the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(contenders.KINDS, "broken", Broken)
        out, raw = config_file.with_suffix(".json"), config_file.with_suffix(".raw.json")
        done = CliRunner().invoke(app, ["bench", str(config_file), "--out", str(out), "--raw", str(raw)])
    assert done.exit_code == 0, done.output
    assert "draft-model" in done.stdout
    assert "no such luck" in done.stdout
    found: dict[str, Any] = json.loads(raw.read_text(encoding="utf-8"))
    assert json.loads(out.read_text(encoding="utf-8")) == without_rows(found) != found
    return found


# -- a whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_every_contender_has_its_figures_or_its_reason(result: dict[str, Any]) -> None:
    one = result["scenarios"]["one"]["contenders"]
    assert set(one) == set(SMALL["contenders"])
    assert one["broken"] == {"error": "ValueError: no such luck"}
    for name in ("plain", "draft-model", "hf", "hf-kept", "hf-assisted"):
        assert one[name]["tokens"] == 14
        assert one[name]["tokens_per_second"]["low"] <= one[name]["tokens_per_second"]["value"]
        assert one[name]["equality"]["equal"] == one[name]["equality"]["rows"] == 2
        assert one[name]["warm_up_s"] > 0
    assert one["hf-kept"]["compile"]["target"]["mode"] == "eager"  # transformers compiles on a GPU only
    two = result["scenarios"]["two"]["contenders"]
    assert two["hf-assisted"] == {"skipped": "transformers assists one row at a time"}
    assert two["hf"]["equality"]["equal"] == 2
    assert two["hf"]["over_plain"]["value"] > 0


def test_drafting_is_compared_with_theory(result: dict[str, Any]) -> None:
    one = result["scenarios"]["one"]["contenders"]
    drafted = one["draft-model"]
    rounds = [r for r in result["scenarios"]["one"]["runs"] if r["contender"] == "draft-model"]
    assert sum(r["generated_tokens"] for r in rounds) == sum(r["accepted_tokens"] + r["rounds"] for r in rounds)
    assert 0 < drafted["acceptance"]["tested"] <= 1
    assert 1 < drafted["theory"]["k"] <= 3  # the last rounds of a row draft less
    assert drafted["theory"]["c"] > 0
    assert drafted["theory"]["predicted"] > 0
    assert one["plain"]["theory"]["k"] == 0
    assert one["plain"]["theory"]["measured"]["value"] == 1
    assert set(drafted["ms_per_round"]) == {"draft", "verify", "other"}


def test_passes_profile_and_copy_are_there(result: dict[str, Any]) -> None:
    copy = result["copy"]["bytes_per_second"]
    row = result["passes"]["plain"]["batch 1, width 3, 32 slots"]
    read = result["models"]["target"]["read"]
    assert row["times_read_once"] == pytest.approx(row["ms"] / 1e3 / (read / copy))
    profile = result["profile"]["draft-model"]
    assert profile["rounds"] == 2
    assert {"draft model", "verify model"} <= set(profile["parts"])
    assert sum(part["share"] for part in profile["parts"].values()) == pytest.approx(1)
    assert 0 < profile["parts"]["draft model"]["count"] <= 3  # the last rounds of a row draft less


def test_targets_are_met_missed_or_not_known(result: dict[str, Any]) -> None:
    found = result["targets"]
    assert [found[name]["met"] for name in SMALL["targets"]] == [True, True, False, None]
    assert "no such luck" in found["to the broken one"]["reason"]
    drafted = result["scenarios"]["one"]["contenders"]["draft-model"]
    assert found["drafting"]["c"] == drafted["theory"]["c"]  # no speed-up without the ratio and the acceptance
    assert found["drafting"]["acceptance"] == drafted["acceptance"]["tested"]
    assert "c" not in found["faster than nothing"]
    assert run.missed(result) == ["wide pass", "to the broken one"]


def test_the_document_has_no_paths_of_this_machine(result: dict[str, Any]) -> None:
    text = json.dumps(result, allow_nan=False)
    assert str(ROOT) not in text
    assert str(Path.home()) not in text.replace(str(ROOT), "")


def test_the_tables_hold_the_figures(result: dict[str, Any]) -> None:
    documents = load_script("write_results")
    made = documents.bench_blocks([result])
    speed = result["scenarios"]["one"]["contenders"]["draft-model"]["tokens_per_second"]["value"]
    assert f"| draft-model | {speed:.1f} (" in made
    assert "| broken | failed: ValueError: no such luck |" in made
    assert "| wide pass | at most 1e-09 |" in made
    assert "not known: scenarios/one/broken/tokens_per_second" in made
    assert "transformers" in documents.bench_headline([result])
    assert documents.bench_blocks([]) == documents.NOT_MEASURED


# -- turns -----------------------------------------------------------------------------------------------------------


class Scripted(Contender):
    """A contender that notes its turns, takes its time, and writes what it is told."""

    kind = "scripted"

    def __init__(self, name: str, log: list[Any], tokens: int = 7, fails_at: int | None = None):
        self.name, self.log, self.tokens, self.fails_at, self.calls = name, log, tokens, fails_at, 0

    def version(self) -> str | None:
        return None

    def refuses(self, batch: int) -> str | None:
        return None

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, ignore_eos: bool) -> Output:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("worn out")
        self.log.append((self.name, prompts[0][0]))
        return Output([[self.tokens] * max_new_tokens for _ in prompts])


def scripted_run(order: list[Contender], repeats: int = 2, until: float | None = None) -> dict[str, Any]:
    pair: Any = type("P", (), {"device": torch.device("cpu"), "dtype": torch.float32, "weights": {}})()
    calls = [Item(("a",), ((1, 2),)), Item(("b",), ((3,),))]
    made = scenario.ScenarioRun(
        "s", Scenario(prompts=2, max_new_tokens=3, repeats=repeats), pair, calls, order, until, lambda what: None
    )
    return made.run()


def test_contenders_take_turns_and_the_order_rotates() -> None:
    log: list[Any] = []
    names = ("x", "y", "z")
    scripted_run([Scripted(name, log) for name in names])
    timed = log[len(names) * scenario.WARM_UPS :]
    turns = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert [[name for name, _ in turn] for turn in turns] == [list("xyz"), list("yzx"), list("yzx"), list("zxy")]
    assert all(len({prompt for _, prompt in turn}) == 1 for turn in turns)  # call by call


def test_one_that_fails_half_way_leaves_and_the_others_go_on() -> None:
    log: list[Any] = []
    found = scripted_run([Scripted("x", log), Scripted("y", log, fails_at=scenario.WARM_UPS + 2)])
    assert found["contenders"]["y"] == {"error": "RuntimeError: worn out"}
    assert found["contenders"]["x"]["tokens"] == 2 * 2 * 3
    assert {r["contender"] for r in found["runs"]} == {"x"}


def test_a_time_limit_takes_repeats_and_never_contenders() -> None:
    log: list[Any] = []
    found = scripted_run([Scripted("x", log), Scripted("y", log)], repeats=50, until=0.0)
    assert {(r["contender"], r["call"], r["repeat"]) for r in found["runs"]} == {
        (name, call, 0) for name in "xy" for call in (0, 1)
    }


def test_other_ids_than_plains_are_a_fault(
    config_file: Path, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the comparison: one token changed in what a chain gives."""
    assert run.faults(result) == []
    honest = Own.run

    def lying(self: Own, *arguments: Any) -> Output:
        output = honest(self, *arguments)
        if not self.plain:
            output.token_ids[0][-1] += 1
        return output

    monkeypatch.setattr(Own, "run", lying)
    pair = Pair.build(ModelChoice(device="cpu"))
    order = [make_contender(name, SMALL["contenders"][name]) for name in ("plain", "draft-model")]
    for contender in order:
        contender.enter(pair)
    calls = [Item(("a",), (tuple(range(5, 15)),))]
    setting = Scenario(prompts=1, max_new_tokens=4, repeats=1, ignore_eos=True)
    found = scenario.ScenarioRun("one", setting, pair, calls, order, None, lambda what: None).run()
    wrong = {**result, "scenarios": {"one": found}}
    assert run.faults(wrong) == ["one: draft-model: 1 of 1 rows"]
    assert found["contenders"]["draft-model"]["equality"]["first_difference"] == {"prompt": "a", "token": 3}
    monkeypatch.setattr("specdec.research.bench.run.run_bench", lambda *arguments: wrong)
    done = CliRunner().invoke(app, ["bench", str(config_file)])
    assert done.exit_code == 1
    assert "one: draft-model: 1 of 1 rows" in done.stderr


# -- figures ---------------------------------------------------------------------------------------------------------


def runs(seconds: dict[tuple[int, int], float], tokens: int = 10, **more: Any) -> list[dict[str, Any]]:
    return [{"call": c, "repeat": r, "seconds": s, "tokens": tokens, **more} for (c, r), s in seconds.items()]


def test_a_slow_repeat_changes_neither_speed_nor_ratio() -> None:
    a = runs({(0, 0): 1.0, (0, 1): 9.0, (0, 2): 1.0, (1, 0): 3.0, (1, 1): 30.0, (1, 2): 3.0})
    b = runs({(0, 0): 2.0, (0, 1): 18.0, (0, 2): 2.0, (1, 0): 6.0, (1, 1): 60.0, (1, 2): 6.0})
    assert figures.speed(a).value == pytest.approx(20 / 4)
    paired = figures.speed_ratio(a, b)
    assert (paired.value, paired.low, paired.high) == pytest.approx((2, 2, 2))


def test_a_slow_repeat_of_the_only_call_changes_neither_speed_nor_ratio() -> None:
    """A machine that was taken away for one run of one contender must not read as a speed-up of the others."""
    a = runs({(0, 0): 2.0, (0, 1): 2.0, (0, 2): 2.0, (0, 3): 2.0, (0, 4): 40.0})
    b = runs({(0, 0): 2.0, (0, 1): 2.0, (0, 2): 2.0, (0, 3): 40.0, (0, 4): 2.0})
    assert figures.speed(a).value == pytest.approx(10 / 2)
    assert figures.speed_ratio(a, b).value == pytest.approx(1)
    assert figures.speed_ratio(a, b).high == pytest.approx(20)  # that it happened is in the interval
    assert figures.speed_ratio(a, runs({(0, 0): 4.0})).value == pytest.approx(2)
    assert figures.speed_ratio(a, runs({(0, 0): 4.0})).low is None
    assert figures.speed_ratio(a, runs({(0, 0): 0.0})).value is None


def test_a_ratio_counts_only_what_both_have_run() -> None:
    a = runs({(0, 0): 1.0, (1, 0): 1.0, (0, 1): 1.0, (1, 1): 1.0})
    b = runs({(0, 0): 2.0, (1, 0): 2.0})
    assert figures.speed_ratio(a, b).value == pytest.approx(2)
    assert figures.speed_ratio(a, runs({(5, 0): 1.0})).value is None


def counted(rounds: int, per_round: int, drafted: int, ms_a_round: float, extra: float = 0.0) -> dict[str, Any]:
    """A call in which every draft stands whole; `extra`: seconds of both prefills together."""
    time = {"total": rounds * ms_a_round / 1e3 + extra, "prefill": extra / 2, "draft_prefill": extra / 2, "draft": 0.0}
    return {
        "call": 0, "repeat": 0, "seconds": time["total"], "tokens": rounds * per_round, "rounds": rounds,
        "generated_tokens": rounds * per_round, "verify_passes": rounds, "drafted_rounds": rounds if drafted else 0,
        "draft_tokens": rounds * drafted, "accepted_tokens": rounds * (per_round - 1),
        "draft_passes": rounds * drafted,
        "tested": [rounds] * drafted, "accepted": [rounds] * drafted,
        "drafted": [rounds] * drafted, "time": {**time, "verify": 0.0, "other": 0.0}, "host_reads": rounds,
    }  # fmt: skip


def test_without_overhead_the_measured_speed_up_is_the_predicted_one() -> None:
    costs = PassCosts(plain=10.0, verify=11.0, draft=1.0)
    plain, drafted = counted(50, 1, 0, 10.0, extra=0.3), counted(10, 5, 4, 15.0, extra=0.7)
    found = figures.prediction([drafted], [plain], costs)
    assert found["predicted"] == pytest.approx(theory.speedup(1.0, 4, 0.1, 0.1))
    assert found["from_a"] == pytest.approx(theory.speedup(1.0, 4, 0.1, 0.1))
    assert found["measured"]["value"] == pytest.approx(found["predicted"])
    assert found["measured_to_predicted"] == pytest.approx(1)
    assert found["outside"] == pytest.approx(0)


def test_time_beside_the_models_is_outside_and_lowers_the_measured_speed_up() -> None:
    costs = PassCosts(plain=10.0, verify=11.0, draft=1.0)
    found = figures.prediction([counted(10, 5, 4, 20.0)], [counted(50, 1, 0, 10.0)], costs)
    assert found["outside"] == pytest.approx(0.25)
    assert found["measured_to_predicted"] == pytest.approx(0.75)


def test_a_head_is_priced_by_its_own_passes_in_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair.build(ModelChoice(device="cpu"))
    monkeypatch.setattr(passes, "pass_ms", lambda runner, shapes, batch, width, *rest: {"median": 100.0 + width})
    item = Item(("one",), (tuple(range(5, 30)),))
    for strategy, draft_ms in (("eagle3:head=demo-head:n_max=2", None), ("draft-model:n_max=2", 101.0)):
        own = make_contender("d", {"kind": "specdec", "strategies": [strategy]})
        assert isinstance(own, Own)
        own.enter(pair)
        output = own.run([list(item.prompts[0])], 9, True)
        runs = [{"call": 0, "repeat": 0, "seconds": 1.0, "tokens": 9, **output.figures}]
        mean = figures.draft_pass_ms(runs)
        assert mean * output.figures["draft_passes"] < 1e3 * output.figures["time"]["total"]
        costs = passes.pass_costs(own, item, 9, 2, mean)
        assert (costs.plain, costs.verify, costs.draft) == (101.0, 103.0, mean if draft_ms is None else draft_ms)
        found = figures.prediction(runs, runs, costs)
        assert found["k"] > 1  # passes of whatever model drafted
        assert found["draft_ms"] == costs.draft


def test_draft_passes_are_counted_without_prefill() -> None:
    pair = Pair.build(ModelChoice(device="cpu"))
    own = make_contender("d", {"kind": "specdec", "strategies": ["draft-model:n_max=2"]})
    own.enter(pair)
    output = own.run([list(range(5, 45))], 9, True)
    assert output.figures["draft_passes"] == output.figures["draft_tokens"]
    assert output.figures["time"]["draft_prefill"] > 0  # 40 tokens are more than ride in a draft pass
    assert isinstance(own, Own)


# -- the command line ------------------------------------------------------------------------------------------------


def test_a_missed_target_is_a_failure_only_when_asked(
    config_file: Path, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.research.bench.run.run_bench", lambda *arguments: result)
    assert CliRunner().invoke(app, ["bench", str(config_file)]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", str(config_file), "--strict"]).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--quick",), "--quick is no option of a benchmark file"),
        (("--smoke",), "one of them"),
        (("--contender", "nobody"), "nobody"),
        (("--inflate", "9b"), "9b"),
        (("--dtype", "int8"), "int8"),
        (("--minutes", "-1"), "minutes"),
    ],
)
def test_bad_options_of_a_benchmark_are_named(
    config_file: Path, arguments: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(contenders.KINDS, "broken", Broken)
    done = CliRunner().invoke(app, ["bench", str(config_file), *arguments])
    assert done.exit_code == 2
    assert named in done.stderr


def test_options_replace_what_the_file_says(config_file: Path) -> None:
    config = bench_config(config_file, {"target": "x", "inflate": "1b"}, ["hf", "draft-model"], 3.0)
    assert (config.models.target, config.models.draft, config.models.inflate) == ("x", None, "1b")
    assert config.minutes == 3.0
    assert list(config.contenders) == ["plain", "draft-model", "hf"]
    assert config.scenarios["two"].contenders == ("hf", "plain")
    assert config.profile is not None
