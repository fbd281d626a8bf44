"""Try every causal language model that transformers knows, tiny and with random weights, against its own `generate`.

    python scripts/sweep_models.py --out results/models.json   # a few minutes on two cores
    python scripts/sweep_models.py llama mpt                   # some types only, to the screen

Each type ends as "equal" (plain decoding, chains, trees and two rows with a common beginning give the greedy text of
`model.generate`), as "refused" with specdec's reason, or as "wrong". Types of which transformers itself cannot build a
tiny model that generates are listed as "not built", with its reason.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from datetime import date
from pathlib import Path

from specdec.decoding.provenance import versions
from specdec.files.compact_json import write_json
from specdec.research.models.sweep import model_types, sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all of them if none is given")
    parser.add_argument("--out", type=Path, help="JSON document to write")
    options = parser.parse_args()
    rows = []
    for row in sweep(options.types or model_types()):
        rows.append(row)
        print(f"{row.model_type:28} {row.outcome:10} {row.reason}", flush=True)
    counts = Counter(row.outcome for row in rows)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if options.out is not None:
        made = {"date": date.today().isoformat(), "versions": versions()}
        write_json(options.out, {**made, "rows": [asdict(row) for row in rows]})
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
