"""Every config in configs/ says only what exists, and the documents name them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from specdec.config import GenerationSettings, load_yaml
from specdec.decoder import check_draft
from specdec.drafters import make_drafters
from specdec.research.ablation import load_ablation
from specdec.research.ablation.store import Plan
from specdec.research.exactness.run import ExactnessConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
# Those of `specdec bench CONFIG` and `specdec train` are tested with these.
RUNS = [p for p in CONFIGS if not p.name.startswith(("bench_", "train_"))]
ABLATIONS = [p for p in RUNS if "pairs" in yaml.safe_load(p.read_text())]
OTHERS = [p for p in RUNS if p not in ABLATIONS]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda p: p.stem)
def test_every_cell_of_an_ablation_can_be_built_and_its_prompts_are_there(path: Path) -> None:
    plan = Plan.make(load_ablation(path))
    assert plan.prompts
    assert len(plan.cells) > 1
    for cell in plan.cells:
        drafters = make_drafters([dict(s) for s in cell.strategies], has_draft=cell.models.draft is not None)
        check_draft(drafters, cell.models.draft)
        GenerationSettings.parse(dict(cell.generation))


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.stem)
def test_other_configs_load(path: Path) -> None:
    data = yaml.safe_load(path.read_text())
    loaded = load_yaml(path) if "pair" in data else load_yaml(path, ExactnessConfig)
    assert loaded is not None


def test_the_smoke_config_has_a_cell_of_each_kind() -> None:
    assert len(load_ablation(ROOT / "configs" / "smoke.yaml").expand()) == 10


def test_documents_name_every_config_and_none_that_is_missing() -> None:
    named = {name for path in DOCUMENTS for name in re.findall(r"configs/([\w-]+\.yaml)", path.read_text())}
    assert {p.name for p in CONFIGS} <= named
    assert {name for name in named if not (ROOT / "configs" / name).is_file()} == set()
