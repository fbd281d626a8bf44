"""Draw the plots of docs/figures.md from the tables in results/, or keep new tables and draw those.

specdec ablate configs/figures.yaml --out runs/figures
specdec ablate configs/context.yaml --out runs/context
specdec ablate configs/baselines.yaml --out runs/baselines
python scripts/make_figures.py --keep runs       # results/figures.*, context.*, baselines.* of those there, then draw
python scripts/make_figures.py                   # draw what is in results/
python scripts/write_results.py                  # the captions
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from specdec.files.compact_json import write_json
from specdec.research.ablation import plots
from specdec.research.ablation.look import svg
from specdec.research.ablation.merge import SUMMARY
from specdec.research.ablation.table import TABLE

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "results", ROOT / "docs" / "images"
SOURCES = {plot.__name__: "context" if plot is plots.context_curve else "figures" for plot in plots.PLOTS.values()}
KEPT = ("date", "commit", "versions", "machine", "rows", "gate")
BASELINES = "baselines"  # whose figures are a table in docs/validation.md, and one plot
SHOWN = ("tokens_per_round", "conditional_acceptance_rate", "draft_acceptance_rate", "distance", "lossy", "prompts")


def keep(runs: Path) -> None:
    """Take the tables of finished ablations, and what they were made with."""
    for name in dict.fromkeys((*SOURCES.values(), BASELINES)):
        if not (runs / name).is_dir():
            continue
        summary = json.loads((runs / name / SUMMARY).read_text(encoding="utf-8"))
        kept = {"config": f"configs/{name}.yaml", **{key: summary[key] for key in KEPT}}
        if name == BASELINES:
            settings = {n: e for n, e in summary["settings"].items() if e["drafts"]}
            kept["settings"] = {n: {key: e[key] for key in SHOWN} for n, e in settings.items()}
        write_json(RESULTS / f"{name}.json", kept)
        shutil.copyfile(runs / name / TABLE, RESULTS / f"{name}.parquet")


def draw(folder: Path) -> None:
    """Write plot_NAME.svg for every plot."""
    drawn = {plot.__name__: plot(RESULTS / f"{SOURCES[plot.__name__]}.parquet") for plot in plots.PLOTS.values()}
    drawn[BASELINES] = plots.cost_acceptance_pareto(RESULTS / f"{BASELINES}.parquet")
    for name, figure in drawn.items():
        (folder / f"plot_{name}.svg").write_text(svg(figure), encoding="utf-8")


def main() -> None:
    """Keep, where asked to, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="the folder with the ablations' folders")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        keep(arguments.keep)
    draw(IMAGES)


if __name__ == "__main__":
    main()
