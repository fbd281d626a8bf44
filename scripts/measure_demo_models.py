"""The corpus of the embedded demo pair, and the figures of a trained pair on its held-out part.

    python scripts/measure_demo_models.py            # measure specdec/demo_models again and rewrite its metrics.json
    python scripts/measure_demo_models.py --head     # only what the EAGLE-3 head drafts
    python scripts/measure_demo_models.py --head runs/eagle3_embedded/head --keep    # another head, and ship it
    python scripts/write_results.py                  # its figures in MODEL_CARD.md

The corpus is the standard library of the running interpreter (or of ``--source``). Files are split into train and
held-out by a hash of their path, so the same file is held out in every Python version. Figures are for the saved
bfloat16 weights, run in float32.
"""

import argparse
import hashlib
import inspect
import json
import platform
import shutil
import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from specdec import SpeculativeDecoder
from specdec.research.bench import origin

HELD_OUT_PERCENT = 4
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}  # tables, not prose
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "specdec" / "demo_models"


def is_held_out(relative: str) -> bool:
    """Whether a file (path relative to the standard library, with slashes) is never trained on."""
    return int(hashlib.sha256(relative.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def read_corpus(source: Path, limit: int = 0) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (train, held-out), each a list of (path, text); identical texts are kept once."""
    train: list[tuple[str, str]] = []
    held: list[tuple[str, str]] = []
    seen: set[str] = set()
    size = 0
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if len(text) < 64 or text in seen:
            continue
        seen.add(text)
        (held if is_held_out(relative.as_posix()) else train).append((relative.as_posix(), text))
        size += len(text)
        if limit and size > limit and held:
            break
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    return [train[i] for i in order], held


def describe_corpus(name: str, train: list[tuple[str, str]], held: list[tuple[str, str]]) -> dict[str, Any]:
    """Return counts and one hash over the sorted paths and texts."""
    digest = hashlib.sha256()
    for path, text in sorted(train + held):
        digest.update(f"{path}\0{text}\0".encode())
    return {
        "source": name,
        "sha256": digest.hexdigest(),
        "train_files": len(train),
        "held_out_files": len(held),
        "train_bytes": sum(len(t.encode()) for _, t in train),
        "held_out_bytes": sum(len(t.encode()) for _, t in held),
    }


def tokenize(tokenizer: Any, files: list[tuple[str, str]]) -> Tensor:
    """Return one stream of ids; every file is preceded by the special token."""
    ids: list[int] = []
    for row in tokenizer([text for _, text in files], add_special_tokens=False, verbose=False)["input_ids"]:
        ids += [0, *row]
    return torch.tensor(ids)


def batches(stream: Tensor, rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield [rows, length + 1] windows for ever: every epoch shifts the windows and shuffles them."""
    generator = torch.Generator().manual_seed(seed)
    inside = torch.arange(length + 1, device=stream.device)
    while True:
        shift = int(torch.randint(length, (1,), generator=generator))
        starts = torch.arange(shift, len(stream) - length - 1, length)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for chunk in starts[: len(starts) // rows * rows].split(rows):
            yield stream[chunk.to(stream.device)[:, None] + inside]


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """The model's own modules without the mask and cache handling around them (which waits for the GPU)."""
    body = model.model
    hidden = body.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rotary = body.rotary_emb(hidden, positions)
    for layer in body.layers:
        hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    return model.lm_head(body.norm(hidden))


def continue_text(model: Any, prompts: Tensor, new: int, temperature: float) -> Tensor:
    """Return prompts and `new` further tokens a row, greedy at temperature 0, never stopping early."""
    config = GenerationConfig(max_new_tokens=new, do_sample=temperature > 0, pad_token_id=0)
    if temperature > 0:
        config.temperature, config.top_k, config.top_p = temperature, 0, 1.0
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)


@torch.no_grad()
def measure_rows(target: Any, draft: Any, rows: Tensor, skip: int = 0) -> dict[str, float]:
    """Teacher-forced figures over [N, T] rows, predictions of positions after `skip`, with the error of the mean."""
    found: dict[str, list[Tensor]] = {}
    for chunk in rows.split(16):
        labels = chunk[:, 1:]
        p_logits, q_logits = (logits_of(m, chunk[:, :-1]) for m in (target, draft))
        p, q = p_logits.softmax(-1), q_logits.softmax(-1)
        top_p, top_q = p_logits.argmax(-1), q_logits.argmax(-1)
        values = {
            "agreement": (top_p == top_q).float(),
            "acceptance_leviathan": torch.minimum(p, q).sum(-1),  # 1 - TV at temperature 1
            "acceptance_argmax_proposal": p.gather(-1, top_q[..., None])[..., 0],
            "target_loss": F.cross_entropy(p_logits.mT, labels, reduction="none"),
            "draft_loss": F.cross_entropy(q_logits.mT, labels, reduction="none"),
            "target_accuracy": (top_p == labels).float(),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value[:, max(0, skip - 1) :].mean(-1).double().cpu())
    result = {name: round(torch.cat(v).mean().item(), 4) for name, v in found.items()}
    spread = torch.cat(found["agreement"])
    error = spread.std().item() / len(spread) ** 0.5 if len(spread) > 1 else float("nan")
    return result | {
        "agreement_error": round(error, 4),
        "rows": len(spread),
        "positions": len(spread) * (rows.shape[1] - max(1, skip)),
    }


@torch.no_grad()
def step_ms(model: Any, steps: int = 60) -> float:
    """Median milliseconds of one cached width-1 step, batch 1, on the model's device."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = model(torch.zeros(1, 128, dtype=torch.long), use_cache=True).past_key_values
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        model(torch.ones(1, 1, dtype=torch.long), use_cache=True, **{name: cache})
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e3, 2)


def load(folder: Path, device: str) -> Any:
    """Return the saved model in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def check_excerpts(target: Any, draft: Any, tokenizer: Any, held: list[tuple[str, str]], n: int) -> list[Any]:
    """Return short held-out excerpts with the agreement on each, so that a test can measure them again."""
    found = []
    for path, text in held[:: max(1, len(held) // n)][:n]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        middle = tokenizer.decode(ids[len(ids) // 2 : len(ids) // 2 + 200])
        rows = torch.tensor([tokenizer(middle)["input_ids"]], device=target.device)
        figures = measure_rows(target, draft, rows)
        found.append({"path": path, "text": middle, "tokens": rows.shape[1], "agreement": figures["agreement"]})
    return found


def measure(out: Path, held: list[tuple[str, str]], device: str, window: int = 1024, n: int = 256) -> dict[str, Any]:
    """Measure the saved pair in float32 on held-out files and on the target's own continuations of them."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    target, draft = load(out / "target", device), load(out / "draft", device)
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    stream = tokenize(tokenizer, held)
    result: dict[str, Any] = {}
    for name, length in (("held_out", window), ("held_out_half_window", window // 2)):
        rows = stream[: len(stream) // length * length].view(-1, length).to(device)
        result[name] = {"window": length} | measure_rows(target, draft, rows)
    result["bytes_per_token"] = round(sum(len(t.encode()) for _, t in held) / len(stream), 3)
    prompts = next(batches(stream, n, 63, 7)).to(device)
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        texts = continue_text(target, prompts, 128, temperature)
        result[name] = measure_rows(target, draft, texts, skip=64)
        if not temperature:
            pairs = [(tokenizer.decode(t[:64]), tokenizer.decode(t[64:])) for t in texts[:6]]
            result["greedy_samples"] = [{"prompt": a, "continuation": b} for a, b in pairs]
    result["check"] = check_excerpts(target, draft, tokenizer, held, 6)
    torch.set_num_threads(2)
    times = {"target": step_ms(target.cpu()), "draft": step_ms(draft.cpu())}
    result["cpu_step_ms"] = times | {"threads": 2, "ratio": round(times["target"] / times["draft"], 2)}
    for name, model in (("target", target), ("draft", draft)):
        size = (out / name / "model.safetensors").stat().st_size
        result[f"{name}_size"] = {"parameters": model.num_parameters(), "bytes": size}
    return result


def measure_head(excerpts: list[dict[str, Any]], head: str = "demo-head", tokens: int = 64) -> dict[str, Any]:
    """Decode the held-out excerpts with a head as chain and tree, at equal passes of it, and with the draft model.

    `draft_ms`: drafting time of a row's round, with one row in a batch; `draft_ms_together`: with all of them. Medians
    of runs that take turns.
    """
    decoder = SpeculativeDecoder.from_pretrained("demo-target", "demo-draft", device="cpu", check=False)
    candidates = {
        "chain": f"eagle3:head={head}:n_max=4",
        "tree": f"eagle3:head={head}:nodes=24:top_k=6:depth=3",
        "draft_model": "draft-model:n_max=4",
    }
    found: dict[str, Any] = {}
    rounds: dict[tuple[str, str], list[float]] = {}
    for repeat in range(6):  # the first one warms up
        for name, strategy in candidates.items():
            for figure, rows in (("draft_ms", 1), ("draft_ms_together", len(excerpts))):
                texts = [e["text"] for e in excerpts]
                stats = decoder.generate(texts, tokens, strategies=strategy, batch_size=rows).stats.to_dict()
                if repeat:
                    rounds.setdefault((name, figure), []).append(1e3 * stats["time"]["draft"] / stats["rounds"])
            figures = {key: stats[key] for key in ("acceptance_length", "rounds", "draft_passes")}
            found[name] = {"strategy": strategy.replace(head, "demo-head"), **figures}
    for (name, figure), milliseconds in rounds.items():
        found[name][figure] = round(statistics.median(milliseconds), 3)
    folder = DEFAULT_OUT / "head" if head == "demo-head" else Path(head)
    made = {"tokens": tokens, "bytes": (folder / "model.safetensors").stat().st_size, **origin()}
    return {"head": found | made | training_of(folder)}


def training_of(folder: Path) -> dict[str, Any]:
    """What the log of the run that a head lies in says at its end; nothing without a log."""
    log = folder.parent / "log.jsonl"
    if not log.is_file():
        return {}
    last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    return {"training": {key: last[key] for key in ("step", "seconds", "loss", "teacher_forced") if key in last}}


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the corpus, the folder and the device."""
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--source-name", default=f"CPython {platform.python_version()} standard library")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def update_metrics(out: Path, found: dict[str, Any]) -> None:
    """Merge new entries into metrics.json."""
    path = out / "metrics.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | found, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Measure a saved pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_corpus_arguments(parser)
    parser.add_argument(
        "--head", nargs="?", const="demo-head", help="measure an EAGLE-3 head alone, or the shipped one"
    )
    parser.add_argument("--keep", action="store_true", help="ship the head, and keep its figures")
    args = parser.parse_args()
    if args.head:
        known = json.loads((args.out / "metrics.json").read_text())
        found = measure_head(known["check"], args.head)
        if args.head == "demo-head" and "training" in known.get("head", {}):  # of the same head, whose log is not here
            found["head"].setdefault("training", known["head"]["training"])
        if args.keep and args.head != "demo-head":
            shutil.copytree(args.head, args.out / "head", dirs_exist_ok=True)
        if args.keep or args.head == "demo-head":
            update_metrics(args.out, found)
        print(json.dumps(found, indent=1))
        return
    found = measure(args.out, read_corpus(args.source)[1], args.device)
    update_metrics(args.out, found)
    print(json.dumps({k: found[k] for k in ("held_out", "greedy", "sampled", "cpu_step_ms")}, indent=1))


if __name__ == "__main__":
    main()
