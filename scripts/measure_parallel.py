"""Two GPUs against one: tensor parallel, prompts shared by processes, the draft on a GPU of its own, layers on both.

    python scripts/measure_parallel.py --out results/parallel_h200.json   # two GPUs, 5 to 8 minutes, 15 GB of disk
    python scripts/measure_parallel.py --tiny --out FILE                  # the same steps with toys on a CPU, by gloo

The target is the embedded one grown to 6.3 billion parameters, the draft the embedded one grown to 0.75: they cost what
such models cost, and accept what the embedded pair accepts. One process measures one GPU, and a draft on a second one;
then torchrun starts two processes, which first share the prompts and then the model; a last process measures one GPU
once more, and layers on both. Passes are recorded (`--compile graph`), or as they are by default ("compiled"); with
layers on both they run eagerly. A time is the best of REPEATS calls after one that records. Texts are compared in exact
mode. FILE is written after every layout. A stage that hangs is stopped, and the next one begins.

"plain N": N prompts in batches of up to 8, 128 new tokens each; "prompts": 8 long prompts and one new token; "draft":
one prompt with drafts of 3 tokens, where texts are compared with plain ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import specdec
from specdec.files.compact_json import write_json
from specdec.models.loading import LoadedPair, inspect_pair
from specdec.research.bench import origin
from specdec.research.models.inflate import Inflation, inflate

TARGET = Inflation(hidden_size=4032, layers=33, intermediate_size=12288, kv_heads=42)  # 6.3e9, halves of 63 heads
DRAFT = Inflation(hidden_size=2016, layers=16, intermediate_size=6144, kv_heads=21)  # 0.75e9
PROMPTS = (
    "def read_lines(path):", "class Stack:\n    def __init__(self):", "import os\n\n\ndef main():", "with open(path)",
    'def join(self, timeout=None):\n    """Wait', "try:\n    import json\nexcept", "    return self._value\n\n    def",
    "def test_empty():\n    assert", "class Node:\n    def", "for i in range(10):", "def __eq__(self, other):",
    "raise ValueError(", "if __name__ == ", "    for key, value in", "def parse(text):\n    tokens =", "async def run",
)  # fmt: skip
NEW_TOKENS, REPEATS, DRAFTED, LONG = 128, 3, 3, 1500
LIMIT, TINY_LIMIT = 510, 1800  # seconds in all
SHARES = {"one": 0.3, "pair": 0.5, "rest": 1.0}  # stages, and how much of the limit each may take
SPREAD, COMPILED = "tensor parallel", "compiled"
FOUND = "found.json"  # in the folder of the models
SILENCE = timedelta(seconds=120)  # a process that waits so long for another one ends


class Stage:
    """One process of a stage: it measures, and the first one writes all that was found after every layout."""

    def __init__(self, folder: Path, tiny: bool, compile: str, out: Path | None):
        self.folder, self.tiny, self.out = folder, tiny, out
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.cuda = torch.cuda.is_available() and not tiny
        self.compile = compile if self.cuda else "off"
        self.found = found_in(folder)
        self.shelf: dict[str, Any] = {}
        self.tokens, self.repeats = (8, 1) if tiny else (NEW_TOKENS, REPEATS)

    def device(self, index: int) -> str:
        return f"cuda:{index}" if self.cuda else "cpu"

    def decoder(self, draft: bool = True, compile: str | None = None, **options: Any) -> specdec.SpeculativeDecoder:
        """A decoder in exact mode; models are loaded once for each place."""
        dtype = "bfloat16" if self.cuda else "float32"
        options |= {"dtype": dtype, **({"draft_dtype": dtype} if draft else {})}
        paths = [str(self.folder / role) for role in ("target", "draft")[: 1 + draft]]
        pair = LoadedPair.load(*paths, shelf=self.shelf, **options)
        models = pair.target, pair.draft, pair.tokenizer, pair.draft_tokenizer
        return specdec.SpeculativeDecoder(*models, strategies=[], exact=True, compile=compile or self.compile)

    def note(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure a layout, unless it was; one that fails is noted, and the others are measured."""
        if "failure" not in self.found.get(name, {"failure": ""}):
            return
        started = time.perf_counter()
        try:
            self.found[name] = measure()
        except Exception as error:
            self.found[name] = {"failure": f"{type(error).__name__}: {error}".split("\n")[0]}
        said = self.found[name].get("failure", "")
        if self.rank == 0 or said:
            print(f"{name}, process {self.rank}: {time.perf_counter() - started:.0f} s", said, flush=True)
        if self.rank == 0:
            (self.folder / FOUND).write_text(json.dumps(self.found), encoding="utf-8")
            if self.out is not None:
                write_json(self.out, document(self.found))
        gc.collect()

    def call(self, decoder: specdec.SpeculativeDecoder, rows: int, **options: Any) -> dict[str, Any]:
        """Decode the first `rows` prompts: seconds, and the ids of the texts by the prompt's number."""
        return self.timed(decoder, list(PROMPTS[:rows]), {"max_new_tokens": self.tokens, **options})

    def long_prompts(self, decoder: specdec.SpeculativeDecoder) -> dict[str, Any]:
        """Read 8 long prompts and add one token to each."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, 2048, (8, 40 if self.tiny else LONG), generator=generator).tolist()
        return self.timed(decoder, ids, {"max_new_tokens": 1})

    def drafting(self, decoder: specdec.SpeculativeDecoder, **option: bool) -> dict[str, Any]:
        """Decode the first prompt with drafts."""
        return self.call(decoder, 1, strategies=[specdec.DraftModel(n_max=DRAFTED, **option)])

    def timed(self, decoder: specdec.SpeculativeDecoder, prompts: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        options = {"strategies": [], "ignore_eos": True, "batch_size": min(len(prompts), 8), **options}
        out, best = decoder.generate(prompts, **options), float("inf")
        for _ in range(self.repeats):
            self.together()
            started = time.perf_counter()
            out = decoder.generate(prompts, **options)
            self.together()
            best = min(best, time.perf_counter() - started)
        made = {"seconds": best, "compile": out.provenance["compile"], "ids": {r.index: r.token_ids for r in out}}
        if options["strategies"]:
            made |= {"tokens_per_round": out.stats.tokens_per_round, "overlap": out.provenance["overlap"]}
        return made

    def together(self) -> None:
        """Wait for the other process."""
        if self.size > 1 and dist.is_initialized():
            dist.barrier()

    def gathered(self, made: dict[str, Any]) -> list[dict[str, Any]]:
        """What all processes have made."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, made)
        return found


def one(stage: Stage) -> None:
    """One process: one GPU, with the draft beside the target or on a second GPU."""
    first, second = stage.device(0), stage.device(1)

    def same_gpu() -> dict[str, Any]:
        decoder = stage.decoder(device=first)
        found = {f"plain {rows}": stage.call(decoder, rows) for rows in (1, 8, 16)}
        return found | {"prompts": stage.long_prompts(decoder), "draft": stage.drafting(decoder)}

    def own_gpu() -> dict[str, Any]:
        decoder = stage.decoder(device=first, draft_device=second)
        kinds = {"overlapped": True, "waiting": False}
        return {name: stage.drafting(decoder, overlap=overlap) for name, overlap in kinds.items()}

    stage.note("one GPU", same_gpu)
    stage.note("draft's own GPU", own_gpu)


def rest(stage: Stage) -> None:
    """One process: one GPU as it is by default, and the target's layers on both."""
    first, second = stage.device(0), stage.device(1)

    def layers() -> dict[str, Any]:
        count = inspect_pair(str(stage.folder / "target")).models[0].config.num_hidden_layers
        places = {f"model.layers.{i}": first if i < count // 2 else second for i in range(count)}
        places |= {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": second, "lm_head": first}
        decoder = stage.decoder(device_map=places, draft_device=first, compile="off")
        return {"plain 1": stage.call(decoder, 1), "draft": stage.drafting(decoder)}

    if stage.cuda:
        stage.note(COMPILED, lambda: by_default(stage, device=first))
        stage.shelf.clear()
    stage.note("layers on both", layers)


def by_default(stage: Stage, **place: Any) -> dict[str, Any]:
    """Plain decoding with passes as they are by default."""
    decoder = stage.decoder(False, "auto", **place)
    return {f"plain {rows}": stage.call(decoder, rows) for rows in (1, 8)}


def pair(stage: Stage) -> None:
    """Two processes: they share the prompts, then the model."""
    if stage.cuda:
        torch.cuda.set_device(stage.rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", stage.rank), timeout=SILENCE)
    else:
        dist.init_process_group("gloo")

    def shards() -> dict[str, Any]:
        decoder = stage.decoder(False, device=stage.device(stage.rank))
        made = stage.call(decoder, 16, shard=f"{stage.rank}/{stage.size}")
        parts = stage.gathered(made)
        ids = {i: row for part in parts for i, row in part["ids"].items()}
        return {"plain 16": {**made, "seconds": max(part["seconds"] for part in parts), "ids": ids}}

    def spread() -> dict[str, Any]:
        decoder = stage.decoder(tp_plan="auto")
        found = {f"plain {rows}": stage.call(decoder, rows) for rows in (1, 8)}
        found |= {"prompts": stage.long_prompts(decoder), "draft": stage.drafting(decoder)}
        ids = {name: made["ids"] for name, made in found.items()}
        return {**found, "same on every rank": all(other == ids for other in stage.gathered(ids))}

    stage.note("prompts shared", shards)
    stage.note(SPREAD, spread)
    if stage.cuda:
        stage.note(f"{SPREAD}, {COMPILED}", lambda: by_default(stage, tp_plan="auto"))
    stage.together()
    os._exit(0)  # a communicator waits for recorded graphs that hold it, and they for the interpreter's end


def save_models(folder: Path, tiny: bool) -> None:
    """Save the pair that is measured."""
    device = "cuda:0" if torch.cuda.is_available() and not tiny else "cpu"
    pair = specdec.load_pair("demo-target", "demo-draft", device=device, dtype="float32" if tiny else "bfloat16")
    for role, model, sizes in (("target", pair.target, TARGET), ("draft", pair.draft, DRAFT)):
        made = model if tiny else inflate(model, **vars(sizes))
        made.save_pretrained(folder / role, max_shard_size="4GB")
        pair.tokenizer.save_pretrained(folder / role)


def table(found: dict[str, Any]) -> list[tuple[str, str, float, str]]:
    """Rows of (layout, what was measured, one GPU's time over its time, texts that are one GPU's); compiled against
    compiled."""
    rows: list[tuple[str, str, float, str]] = []
    if "one GPU" not in found:
        return rows
    base = found["one GPU"]

    def add(layout: str, name: str, against: dict[str, Any], plain: dict[str, Any] | None = None) -> None:
        made = found.get(layout, {}).get(name)
        if made is None:
            return
        wanted = {str(i): row for i, row in (plain or against)["ids"].items()}
        same = sum(wanted.get(str(i)) == row for i, row in made["ids"].items())
        rows.append((layout, name, against["seconds"] / made["seconds"], f"{same} of {len(made['ids'])} texts equal"))

    for name in ("plain 1", "plain 8", "prompts", "draft"):
        add(SPREAD, name, base[name])
    add("prompts shared", "plain 16", base["plain 16"])
    for name in ("waiting", "overlapped"):
        add("draft's own GPU", name, base["draft"], base["plain 1"])
    for name in ("plain 1", "draft"):
        add("layers on both", name, base[name], base["plain 1"])
    add("one GPU", "draft", base["plain 1"])
    for name, against in found.get(COMPILED, {}).items():
        add(COMPILED, name, base[name])
        add(f"{SPREAD}, {COMPILED}", name, against)
    return rows


def within(found: dict[str, Any]) -> dict[str, bool]:
    """Whether speculative texts are plain ones in each layout, and all ranks' are the same."""
    made = {
        name: f["draft"]["ids"] == f["plain 1"]["ids"] for name, f in found.items() if {"draft", "plain 1"} <= f.keys()
    }
    spread = found.get(SPREAD)
    return made if spread is None else made | {"ranks": spread["same on every rank"]}


def run_stage(name: str, limit: float, arguments: Sequence[str], tiny: bool) -> None:
    """Run a stage in processes of its own, for at most `limit` seconds."""
    command = [sys.executable, __file__, "--stage", name, *arguments]
    if name == "pair":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # Two GPUs need no multicast, which some hosts do not allow.
    multicast = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    environment = {**multicast, "OMP_NUM_THREADS": "1" if tiny else "8", **os.environ}
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(max(limit, 1))
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {limit:.0f} s", flush=True)
        process.terminate()  # torchrun ends its processes, which are in sessions of their own
        with suppress(subprocess.TimeoutExpired):
            process.wait(35)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)


def found_in(folder: Path) -> dict[str, Any]:
    """What was found so far, by layout."""
    file = folder / FOUND
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def run_stages(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run all stages within the limit; where recorded passes fail on two processes, these run once more, eagerly."""
    started, limit = time.monotonic(), TINY_LIMIT if given.tiny else LIMIT
    out = [] if given.out is None else ["--out", str(given.out)]
    arguments = ["--folder", str(folder), *out, *(["--tiny"] if given.tiny else [])]
    if not (folder / "draft").exists():
        save_models(folder, given.tiny)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    def stage(name: str, compile: str, share: float) -> None:
        left = limit - (time.monotonic() - started)
        run_stage(name, min(left, share * limit), [*arguments, "--compile", compile], given.tiny)

    for name, share in SHARES.items():
        stage(name, given.compile, share)
        if name == "pair" and given.compile != "off" and "ranks" not in within(succeeded(found_in(folder))):
            stage(name, "off", share / 2)
    return found_in(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the JSON document")
    parser.add_argument("--tiny", action="store_true", help="the embedded pair on a CPU")
    parser.add_argument("--folder", type=Path, help="where the grown models are kept; default: a temporary folder")
    parser.add_argument("--compile", choices=("graph", "off"), default="graph", help="how passes run")
    parser.add_argument("--stage", choices=tuple(SHARES), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 8)))
    if given.stage is not None:
        {"one": one, "pair": pair, "rest": rest}[given.stage](Stage(given.folder, given.tiny, given.compile, given.out))
        return
    if not given.tiny and torch.cuda.device_count() < 2:
        sys.exit("needs two GPUs; --tiny runs the same steps on a CPU")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="specdec-parallel-"))
    try:
        report(run_stages(folder, given))
    finally:
        if given.folder is None:
            shutil.rmtree(folder)


def succeeded(found: dict[str, Any]) -> dict[str, Any]:
    """The layouts that did not fail."""
    return {name: f for name, f in found.items() if "failure" not in f}


def document(found: dict[str, Any]) -> dict[str, Any]:
    """What is written: the table, and what was measured without the texts."""
    slim = {n: {k: {x: y for x, y in v.items() if x != "ids"} if isinstance(v, dict) else v for k, v in f.items()}
            for n, f in found.items()}  # fmt: skip
    rows, same = table(succeeded(found)), within(succeeded(found))
    return {**origin(), "new_tokens": NEW_TOKENS, "n_max": DRAFTED, "rows": rows, "within": same, "measured": slim}


def report(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'layout':<27}{'measured':<12}{'speed-up':>9}  texts against one GPU, plain")
    for layout, name, ratio, texts in table(succeeded(found)):
        print(f"{layout:<27}{name:<12}{ratio:>8.2f}x  {texts}")
    print("in each layout speculative = plain:", within(succeeded(found)))
    print("failed:", {name: f["failure"] for name, f in found.items() if "failure" in f} or "none")


if __name__ == "__main__":
    main()
