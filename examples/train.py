"""Train a byte-level language model on the Python standard library's source, sharded by zcompile or by FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/train.py --engine zcompile

Runs on CPUs (gloo) and on GPUs (NCCL). A run is decided by its seed and `--batch`, the sequences per step over all
ranks, and not by the engine or the number of ranks. So loss curves can be laid over one another: each run writes
OUT/ENGINE.json and draws all of OUT/*.json into OUT/loss.png.
"""

import argparse
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zcompile
from zcompile.cli import require

VOCABULARY = 256  # bytes
VALIDATION_BATCHES = 16
VALIDATION_SEED = 1 << 40  # far from `seed + step` of any training batch
MICROBATCHES = 4  # of a pipeline
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # stages have different parameters


def make_parser(description: str) -> argparse.ArgumentParser:
    """The command line; defaults fit two CPU cores and about three minutes."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    add = parser.add_argument
    add("--engine", choices=["zcompile", "eager", "fsdp2"], default="zcompile", help="eager: sharded, uncompiled")
    add("--inner", choices=["inductor", "aot_eager"], default="inductor", help="what zcompile hands its graphs to")
    add("--transport", choices=["auto", "p2p", "nccl", "gloo"], default="auto", help="of zcompile")
    add("--steps", type=int, default=250)
    add("--batch", type=int, default=32, help="sequences per step over all ranks")
    add("--tokens", type=int, default=128, help="bytes per sequence")
    add("--lr", type=float, default=3e-3, help="at the end of the warm-up")
    add("--warmup", type=int, default=40, help="steps")
    add("--dim", type=int, default=192)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=6)
    add("--bf16", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(), help="torch.autocast")
    add("--int8-gathers", action="store_true", help="zcompile gathers matrices in int8, with a scale for 256 elements")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--corpus-mb", type=float, default=8.0, help="cap on the corpus")
    add("--log-every", type=int, default=10, help="steps")
    add("--checkpoint-every", type=int, default=0, help="steps; 0: never. Written to OUT/NAME-step-N")
    add("--resume", type=Path, help="a checkpoint directory, of any engine and number of ranks")
    add("--stop-after", type=int, help="end at this step of the schedule, as an interrupted run would")
    add("--out", type=Path, default=Path("out"))
    parser.set_defaults(pp=1, tp=1)
    return parser


class Attention(nn.Module):
    """Causal self-attention with rotary positions (RoFormer, arXiv:2104.09864)."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # Heads come first, and are those of this rank under tensor parallelism.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).permute(3, 0, 2, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + d / 2]) by its position's angle; the dtype of x stays."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    """Gated feed-forward (arXiv:2002.05202), by default 8/3 wide so that it costs what a plain one of width 4 does."""

    def __init__(self, dim: int, hidden: int | None = None):
        super().__init__()
        hidden = hidden or -(-8 * dim // 3 // 64) * 64
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(dim), Attention(dim, heads)
        self.mlp_norm, self.mlp = nn.RMSNorm(dim), SwiGLU(dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Decoder-only transformer over bytes. Its forward returns the loss, so that compiled graphs hold that too."""

    def __init__(self, dim: int, layers: int, heads: int, tokens: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        half = dim // heads // 2
        angles = torch.outer(torch.arange(tokens), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The loss; both arguments are int64 of shape (sequences, tokens). Without targets, the last layer's result."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.head(self.norm(x))
        return x if targets is None else loss_of(x, targets)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def read_corpus(limit_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation bytes (uint8): Python's own library, which every machine has; the last 5 % validate."""
    root = Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:  # what happens to be installed
            continue
        data += path.read_bytes()
        if len(data) >= limit_bytes:
            break
    corpus = torch.frombuffer(data[:limit_bytes], dtype=torch.uint8)
    split = len(corpus) * 95 // 100
    return corpus[:split], corpus[split:]


def draw_batch(corpus: torch.Tensor, seed: int, args: argparse.Namespace, device: torch.device):
    """This rank's slice of the batch that `seed` stands for. No state, so a resumed run goes on where it was.

    Ranks of tensor parallelism, and the stages of a pipeline, have one slice.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(corpus) - args.tokens, (args.batch,), generator=generator)
    slices = dist.get_world_size() // (args.pp * args.tp)
    mine = starts.chunk(slices)[dist.get_rank() // args.tp % slices]
    sequences = corpus[mine[:, None] + torch.arange(args.tokens + 1)].to(device, torch.int64)
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The sharded model. Every rank seeds alike: each keeps its slice of its own initial values."""
    torch.manual_seed(args.seed)
    model = LanguageModel(args.dim, args.layers, args.heads, args.tokens)
    shape = (args.pp, dist.get_world_size() // (args.pp * args.tp), args.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    keep_stage(model, mesh["pp"])
    if args.tp > 1 or args.engine == "fsdp2":
        model.to(device)
    if args.tp > 1:
        parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
    if args.engine == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])
    zcompile.shard(model, mesh["dp"], gather_dtype=torch.int8 if args.int8_gathers else None)
    if args.engine == "zcompile":
        model.compile(backend="zcompile", options={"inner": args.inner, "transport": args.transport})
    return model


TENSOR_PARALLEL = {
    "blocks.*.attention.qkv": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(),
    "blocks.*.mlp.gate": ColwiseParallel(),
    "blocks.*.mlp.up": ColwiseParallel(),
    "blocks.*.mlp.down": RowwiseParallel(),
}


def cosine(args: argparse.Namespace, step: int) -> float:
    """Factor on the learning rate: a linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    done = (step - args.warmup) / max(args.steps - args.warmup, 1)
    return 0.55 + 0.45 * math.cos(math.pi * min(done, 1.0))


def keep_stage(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Keep the layers of this rank's stage of a pipeline. Their names stay, since checkpoints hold all stages."""
    model.pipeline, stage, layers = mesh.get_group(), mesh.get_local_rank(), len(model.blocks)
    for i in range(layers):
        if i * mesh.size() // layers != stage:
            delattr(model.blocks, str(i))
    if stage > 0:
        model.embedding = nn.Identity()
    if stage < mesh.size() - 1:
        model.norm, model.head = nn.Identity(), nn.Identity()


class Training(Stateful):
    """All that a checkpoint must hold. Parameters are DTensors, which `dcp` cuts anew for another number of ranks.

    Attributes:
        name: of the run's files.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module):
        self.args, self.model, self.name = args, model, args.engine
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)
        if args.engine != "fsdp2":
            zcompile.fuse_optimizer(model, self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: cosine(args, step))
        self.step = 0
        self.records: list[dict] = []

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=BY_NAME)
        scheduler = self.scheduler.state_dict()
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "step": self.step,
            "records": json.dumps(self.records),
        }

    def load_state_dict(self, state: dict) -> None:
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **states, options=BY_NAME)
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.records = state["step"], json.loads(state["records"])

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.model(inputs, targets)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute clipped gradients; the loss."""
        loss = self.evaluate(inputs, targets)
        loss.backward()
        zcompile.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.backward(inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return loss.detach()

    def measured(self) -> dict:
        """What else a record holds. All ranks call it."""
        return {}

    def draw(self) -> list[Path]:
        """The pictures, drawn of all runs in OUT."""
        return [draw_curves(self.args.out)]


class PipelineTraining(Training):
    """Training of a stage of a pipeline."""

    def __init__(self, args: argparse.Namespace, model: nn.Module):
        super().__init__(args, model)
        self.stage, device = model.pipeline.rank(), next(model.parameters()).device
        stage = PipelineStage(model, self.stage, args.pp, device, group=model.pipeline)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_of)

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor, train: bool = False) -> torch.Tensor:
        """The loss times the number of stages, where this is the last one, else 0. The mean over ranks is the loss."""
        run, last, losses = self.schedule.step if train else self.schedule.eval, self.stage == self.args.pp - 1, []
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.args.bf16):
            run(*([] if self.stage else [inputs]), target=targets if last else None, losses=losses)
        return torch.stack(losses).mean() * self.args.pp if last else torch.zeros((), device=inputs.device)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with zcompile.accumulate(self.model, reduce="last"):
            loss = self.evaluate(inputs, targets, train=True)
        norm = zcompile.clip_grad_norm_(self.model.parameters(), math.inf).square()  # of this stage
        dist.all_reduce(norm, group=self.model.pipeline)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), 1.0, norm.sqrt(), foreach=False)
        return loss


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.clone()
    dist.all_reduce(value)  # gloo has no mean
    return value.item() / dist.get_world_size()


def train(training: Training, corpus: torch.Tensor, device: torch.device) -> float:
    """Run to the last step and return tokens per second over all ranks, leaving out the first step, which compiles."""
    args = training.args
    last = min(args.steps, args.stop_after or args.steps)
    from tqdm import tqdm

    bar = tqdm(total=args.steps, initial=training.step, desc=training.name, disable=dist.get_rank() > 0)
    first = training.step
    timed_from = logged_at = time.perf_counter()
    logged_step = first
    while training.step < last:
        inputs, targets = draw_batch(corpus, args.seed + training.step, args, device)
        loss = training.train_step(inputs, targets)
        bar.update()
        step = training.step
        if step % args.log_every == 0 or step in (first + 1, last):
            value = mean_over_ranks(loss)
            now = time.perf_counter()
            speed = (step - logged_step) * args.batch * args.tokens / (now - logged_at)
            logged_at, logged_step = now, step
            timed_from = now if step == first + 1 else timed_from
            record = {"step": step, "loss": value, "tokens_per_second": round(speed)}
            training.records.append(record | training.measured())
            bar.set_postfix(loss=f"{value:.3f}", tokens_per_s=f"{speed:.0f}")
        if args.checkpoint_every and step % args.checkpoint_every == 0:
            dcp.save({"training": training}, checkpoint_id=args.out / f"{training.name}-step-{step}")
    bar.close()
    return (logged_step - first - 1) * args.batch * args.tokens / (logged_at - timed_from) if last > first + 1 else 0.0


@torch.no_grad()
def validate(training: Training, corpus: torch.Tensor, device: torch.device) -> float:
    """Mean loss over the same held-out batches whatever the engine and the seed."""
    training.model.eval()
    total = torch.zeros((), device=device)
    for index in range(VALIDATION_BATCHES):
        inputs, targets = draw_batch(corpus, VALIDATION_SEED + index, training.args, device)
        total += training.evaluate(inputs, targets)
    training.model.train()
    return mean_over_ranks(total / VALIDATION_BATCHES)


def draw_curves(out: Path) -> Path:
    """Overlay the curves of every run in `out`. Later ones are thinner, so that one on top of another shows both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for index, path in enumerate(sorted(out.glob("*.json"))):
        records = json.loads(path.read_text())["records"]
        steps, losses = [r["step"] for r in records], [r["loss"] for r in records]
        axes.plot(steps, losses, label=path.stem, linewidth=max(6 - 2 * index, 1.5), alpha=0.8)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)", title="Bytes of the Python standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out / "loss.png", dpi=120, bbox_inches="tight")
    return out / "loss.png"


def report(training: Training, speed: float, validation: float) -> None:
    """Write the run's JSON and the pictures, and say how it went."""
    args, records = training.args, training.records
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    run = {
        "settings": settings | {"world": dist.get_world_size()},
        "validation_loss": validation,
        "tokens_per_second": round(speed),
        "records": records,
    }
    (args.out / f"{training.name}.json").write_text(json.dumps(run, indent=1))
    first, final = records[0], records[-1]
    print(f"training loss    {first['loss']:.4f} (step {first['step']}) -> {final['loss']:.4f} (step {final['step']})")
    print(f"validation loss  {validation:.4f}")
    print(f"tokens/s         {speed:.0f} on {dist.get_world_size()} ranks, without the first step")
    if args.engine != "fsdp2":
        for dtype, count in zcompile.stats(training.model)["gathered_bytes"].items():
            print(f"gathered         {count / 1e6:.1f} MB of {dtype}")
    for path in training.draw():
        print(f"picture          {path}")


Build = Callable[[argparse.Namespace, torch.device], nn.Module]


def run(args: argparse.Namespace, build: Build, training_type: type[Training] = Training) -> None:
    """Train the model that `build` makes, on this rank's device, and write its results."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world, tp, pp = dist.get_world_size(), args.tp, args.pp
    if world % (tp * pp) or args.heads % tp:
        raise SystemExit(f"--tp {tp} times --pp {pp} must divide the {world} ranks, and --tp the {args.heads} heads")
    multiple = world // (tp * pp) * (MICROBATCHES if pp > 1 else 1)
    if args.batch % multiple:
        raise SystemExit(f"--batch {args.batch} must be a multiple of {multiple}, data-parallel ranks x microbatches")
    args.out.mkdir(parents=True, exist_ok=True)

    training_bytes, validation_bytes = read_corpus(int(args.corpus_mb * 1e6))
    model = build(args, device)
    training = training_type(args, model)
    of_stage = torch.tensor(float(sum(parameter.numel() for parameter in model.parameters())), device=device)
    size = pp * mean_over_ranks(of_stage)
    if dist.get_rank() == 0:
        text = len(training_bytes)
        print(f"{size / 1e6:.2f} M parameters, {text / 1e6:.1f} MB of text, {dist.get_world_size()} ranks")
    if args.resume:
        dcp.load({"training": training}, checkpoint_id=args.resume)
    speed = train(training, training_bytes, device)
    validation = validate(training, validation_bytes, device)
    if dist.get_rank() == 0:
        report(training, speed, validation)
    dist.destroy_process_group()


def main() -> None:
    require("examples/train.py", "train", "matplotlib", "tqdm")
    parser = make_parser(__doc__)
    about = "ranks of tensor parallelism, which divide the heads and see the same batches"
    parser.add_argument("--tp", type=int, default=1, help=about)
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline, which divide the layers")
    args = parser.parse_args()
    if args.pp > 1 and (args.engine == "fsdp2" or args.layers < args.pp):
        parser.error(f"--pp {args.pp} needs an engine of zcompile, and at least as many --layers")
    run(args, build, PipelineTraining if args.pp > 1 else Training)


if __name__ == "__main__":
    main()
