"""Train the embedded demo pair: a small Llama target and its draft, both on CPython's standard library.

One command, minutes on one GPU::

    python scripts/train_demo_models.py                         # everything, into specdec/demo_models
    python scripts/train_demo_models.py --smoke --out /tmp/pair # the same path in tiny sizes, on a CPU, in a minute
    python scripts/train_demo_models.py --stages draft measure  # keep the target, train the draft again

Held-out files (see measure_demo_models.py) are used neither for the tokenizer nor for training. Seeds are fixed; GPU
kernels may still differ in the last bits, and ``--target-seconds`` and ``--draft-seconds`` shorten the schedule.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from measure_demo_models import (
    add_corpus_arguments,
    batches,
    continue_text,
    describe_corpus,
    load,
    logits_of,
    measure,
    read_corpus,
    tokenize,
    update_metrics,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Loss = Callable[[Tensor], Tensor]
EOS = "<|endoftext|>"
STAGES = ["target", "draft", "measure"]
GOAL = 0.70  # greedy agreement of draft and target on held-out files


@dataclass(frozen=True)
class Shape:
    """The sizes of one Llama model."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int

    def build(self, vocab: int) -> LlamaForCausalLM:
        """Return a freshly initialised model; residual outputs start at zero."""
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.mlp,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = LlamaForCausalLM(config)
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
        return model


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result, besides the corpus."""

    vocab: int = 2048
    context: int = 1024
    batch: int = 32
    target: Shape = Shape(hidden=192, layers=24, mlp=336, heads=6, kv_heads=2)
    drafts: tuple[Shape, ...] = (Shape(224, 1, 512, 8, 2), Shape(192, 2, 336, 6, 2))
    target_steps: int = 3000
    draft_steps: int = 4500
    weight_decay: float = 0.1
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    hard_label: float = 0.5  # share of the argmax term in the draft's loss
    generated_batches: tuple[float, ...] = (1.0, 0.5)  # temperature of each batch of self-generated text
    generated_rows: int = 2048
    generated_length: int = 512
    corpus_limit: int = 0
    seed: int = 0


SMOKE = Settings(
    vocab=512,
    context=64,
    batch=4,
    target=Shape(64, 3, 96, 2, 1),
    drafts=(Shape(64, 1, 64, 2, 1),),
    target_steps=30,
    draft_steps=20,
    generated_batches=(1.0,),
    generated_rows=4,
    generated_length=96,
    corpus_limit=300_000,
)


def train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE whose decode(encode(x)) is x; one special token, id 0, never added by itself."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[EOS], initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz, for matrices; all matrices of one shape go in one batch."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                gradient = torch.stack([p.grad for p in params])
                state = self.state[params[0]]
                buffer = state.setdefault("momentum", torch.zeros_like(gradient))
                buffer.lerp_(gradient, 1 - group["momentum"])
                update = orthogonalise(gradient.lerp(buffer, group["momentum"]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(update.to(params[0].dtype)), alpha=-scale)


def orthogonalise(gradient: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrices, roughly (five Newton-Schulz steps)."""
    x = gradient.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if wide else x.mT


def compile_layers(model: LlamaForCausalLM, enabled: bool) -> LlamaForCausalLM:
    """Compile each decoder layer (one compilation serves all of them)."""
    if enabled:
        torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return model


def make_step(model: nn.Module, loss: Loss, example: Tensor, graph: bool) -> Loss:
    """Return forward and backward as one call; as one CUDA graph on request, since narrow models are launch bound."""

    def plain(window: Tensor) -> Tensor:
        model.zero_grad(set_to_none=True)
        value = loss(window)
        value.backward()
        return value.detach()

    if not graph:
        return plain
    static, side, recorded = example.clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            plain(static)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)  # inside the graph gradients are then assigned, not added
    with torch.cuda.graph(recorded):
        value = loss(static)
        value.backward()

    def replay(window: Tensor) -> Tensor:
        static.copy_(window)
        recorded.replay()
        return value.detach()

    return replay


def fit(
    model: nn.Module,
    stream: Iterator[Tensor],
    loss: Loss,
    probe: Callable[[], float],
    steps: int,
    seconds: float,
    s: Settings,
    graph: bool,
) -> dict[str, Any]:
    """Minimise `loss` over `steps` batches; the schedule ends early, decayed to zero, if `seconds` would run out."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    adam = torch.optim.AdamW(others, s.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, s.muon_lr, s.weight_decay), adam]
    base = [o.param_groups[0]["lr"] for o in optimizers]
    step_loss = make_step(model, loss, next(stream), graph)
    started = time.perf_counter()
    curve: list[dict[str, Any]] = []
    progress, step = 0.0, 0
    while progress < 1.0:
        spent = time.perf_counter() - started
        progress = max(step / steps, spent / seconds)
        factor = min(1.0, (step + 1) / 100) * min(1.0, max(0.0, (1 - progress) / 0.6))
        for optimizer, lr in zip(optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * factor
        value = step_loss(next(stream))
        for optimizer in optimizers:
            optimizer.step()
        if step % max(1, steps // 6) == 0 or progress >= 1.0:
            curve.append({"step": step, "train": round(value.item(), 4), "held_out": probe()})
            print(f"  {time.perf_counter() - started:.0f}s {curve[-1]}", flush=True)
        step += 1
        if step % 20 == 0:
            value.item()  # so that the clock above sees finished work
    return {"steps": step, "seconds": round(time.perf_counter() - started, 1), "curve": curve}


def train_target(s: Settings, train: Tensor, held: Tensor, args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Train the target by next-token loss."""
    torch.manual_seed(s.seed)
    model = compile_layers(s.target.build(s.vocab).to(args.device), args.compile)
    entropy = torch.compile(F.cross_entropy, dynamic=False) if args.compile else F.cross_entropy

    def loss(window: Tensor) -> Tensor:
        with torch.autocast(args.device, torch.bfloat16):
            logits = logits_of(model, window[:, :-1])
        return entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())

    @torch.no_grad()
    def probe() -> float:
        source = batches(held, s.batch, s.context, 1)
        return round(statistics.fmean(loss(next(source)).item() for _ in range(4)), 4)

    stream = batches(train, s.batch, s.context, s.seed)
    record = fit(model, stream, loss, probe, s.target_steps, args.target_seconds, s, args.graphs)
    return model, record | {"tokens_seen": record["steps"] * s.batch * s.context}


def generate_text(target: Any, train: Tensor, s: Settings) -> Tensor:
    """Return text that the target itself wrote after prompts from the training files, one stream."""
    model = LlamaForCausalLM(target.config).to(train.device, torch.bfloat16).eval()
    model.load_state_dict(target.state_dict())
    if train.is_cuda:  # one block for the growing cache to live in, instead of thousands of allocations
        torch.cuda.empty_cache()
        torch.empty(24 << 30, dtype=torch.uint8, device=train.device)
    parts = []
    for i, temperature in enumerate(s.generated_batches):
        prompts = next(batches(train, s.generated_rows, 63, 100 + i))
        parts.append(continue_text(model, prompts, s.generated_length - 64, temperature).flatten())
    return torch.cat(parts)


def distil(logits: Tensor, teacher: Tensor, hard: float) -> Tensor:
    """Forward KL to the teacher, mixed with cross entropy on the teacher's argmax."""
    log_q = F.log_softmax(logits.float(), -1).flatten(0, 1)
    log_p = F.log_softmax(teacher.float(), -1).flatten(0, 1)
    soft = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return (1 - hard) * soft + hard * F.nll_loss(log_q, log_p.argmax(-1))


def train_draft(
    shape: Shape, target: Any, s: Settings, texts: tuple[Tensor, Tensor, Tensor], args: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    """Distil one draft from the target, half on real and half on self-generated text."""
    torch.manual_seed(s.seed + 1)
    train, generated, held = texts
    model = compile_layers(shape.build(s.vocab).to(args.device), args.compile)
    objective = torch.compile(distil, dynamic=False) if args.compile else distil

    def both(window: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(args.device, torch.bfloat16):
            with torch.no_grad():
                teacher = logits_of(target, window[:, :-1])
            return logits_of(model, window[:, :-1]), teacher

    def loss(window: Tensor) -> Tensor:
        return objective(*both(window), s.hard_label)

    @torch.no_grad()
    def probe() -> float:
        source = batches(held, s.batch, s.context, 1)
        pairs = (both(next(source)) for _ in range(4))
        return round(statistics.fmean((a.argmax(-1) == b.argmax(-1)).float().mean().item() for a, b in pairs), 4)

    sources = [batches(text, s.batch // 2, s.context, s.seed + i) for i, text in enumerate((train, generated))]
    mixed = (torch.cat(pair) for pair in zip(*sources, strict=True))
    record = fit(model, mixed, loss, probe, s.draft_steps, args.draft_seconds, s, args.graphs)
    return model, {"layers": shape.layers, "agreement_while_training": record["curve"][-1]["held_out"]} | record


def train_drafts(s: Settings, target: Any, tokenizer: Any, train: Tensor, held: Tensor, args: Any) -> dict[str, Any]:
    """Train the draft shapes in order and keep the first that reaches the goal, or else the best."""
    texts = (train, generate_text(target, train, s), held)
    kept: dict[str, Any] = {"agreement_while_training": -1.0}
    attempts = []
    for shape in s.drafts:
        print(f"draft {shape}", flush=True)
        draft, record = train_draft(shape, target, s, texts, args)
        attempts.append({k: record[k] for k in ("layers", "steps", "seconds", "agreement_while_training")})
        if kept["agreement_while_training"] < min(GOAL, record["agreement_while_training"]):
            kept = record
            save(draft, tokenizer, args.out / "draft")
    return kept | {"generated_tokens": len(texts[1]), "attempts": attempts}


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write weights in bfloat16, config, generation config and tokenizer."""
    clean = LlamaForCausalLM(model.config).bfloat16()
    clean.load_state_dict(model.state_dict())
    clean.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def parse() -> tuple[argparse.Namespace, Settings]:
    """Return the command line and the settings it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_corpus_arguments(parser)
    cuda = torch.cuda.is_available()
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--draft-layers", type=int, nargs="+", default=[2], help="1, 2 or both: first to reach 0.7")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda)
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=cuda)
    for name in ("target", "draft"):
        parser.add_argument(f"--{name}-seconds", type=float, default=1e9, help="decay early to end by then")
    args = parser.parse_args()
    if args.smoke:
        return args, SMOKE
    s = Settings()
    return args, replace(s, drafts=tuple(d for d in s.drafts if d.layers in args.draft_layers))


def main() -> None:
    """Run the stages; metrics.json is rewritten after each."""
    args, s = parse()
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    train_files, held_files = read_corpus(args.source, s.corpus_limit)
    corpus = describe_corpus(args.source_name, train_files, held_files)
    if "target" in args.stages:
        tokenizer: Any = train_tokenizer([text for _, text in train_files], s.vocab)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.out / "target")
    train, held = (tokenize(tokenizer, files).to(args.device) for files in (train_files, held_files))
    corpus |= {"train_tokens": len(train), "held_out_tokens": len(held)}
    print(corpus, flush=True)
    made_with = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
    }
    if "target" in args.stages:
        target, record = train_target(s, train, held, args)
        save(target, tokenizer, args.out / "target")
        update_metrics(args.out, {"corpus": corpus, "settings": asdict(s), "made_with": made_with, "target": record})
    elif "draft" in args.stages:
        target = compile_layers(load(args.out / "target", args.device), args.compile)
    if "draft" in args.stages:
        update_metrics(args.out, {"draft": train_drafts(s, target, tokenizer, train, held, args)})
    if "measure" in args.stages:
        size = {"window": 64, "n": 4} if args.smoke else {}
        found = measure(args.out, held_files, args.device, **size)
        update_metrics(args.out, found)
        print({k: found[k] for k in ("held_out", "greedy", "sampled", "cpu_step_ms")})


if __name__ == "__main__":
    main()
