"""Runs in which one rank fails: at a random place it raises, is killed, stops for a while or skips a batch.

A run is right if all ranks end with the unsharded model's parameters, or all in time with a text that names a rank and
a parameter."""

import contextlib
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.cuda_graphs import graphs_on_cpu
from tests.support.ranks import take_gpu
from tests.support.time_limits import scaled
from zcompile.ranks.order_watch import PERIOD_S

WORLD, STEPS, LAYERS = 2, 4, 4
MORE_STEPS = 6  # before both graphs are captured: with the extra layer, and without
KINDS = ("raise", "raise and go on", "kill", "stop", "stop long", "skip")
PLACES = ("shard", "forward", "backward", "step")
START_S = scaled(60.0)  # the longest that ranks take to come to the place, beside other tests
SLACK_S = scaled(5.0)  # for a machine with more processes than cores


class Injected(Exception):
    """What a rank raises that goes on afterwards."""


@dataclass(frozen=True)
class Fault:
    seed: int
    kind: str
    place: str
    rank: int
    step: int
    layer: int
    compiled: bool
    microbatches: int
    timeout_s: float
    device: str
    captured: bool = False

    @classmethod
    def of(cls, seed: int, timeout_s: float, device: str = "cpu", captured: bool = False) -> "Fault":
        """The run of a seed. With `captured`, the fault is in a replay, where there is no Python that could raise."""
        choose = random.Random(seed)
        kind, place = choose.choice(KINDS), choose.choice(PLACES)
        if kind in ("skip", "raise and go on") and place == "shard":
            place = "forward"
        rank, step, layer = (choose.randrange(count) for count in (WORLD, STEPS, LAYERS))
        compiled, microbatches = choose.random() < 0.5, choose.choice((1, 2))
        if captured:
            place = "forward" if place == "shard" else place
            kind = "stop" if "raise" in kind and place != "step" else kind
            step, compiled = MORE_STEPS + step, True
        return cls(seed, kind, place, rank, step, layer, compiled, microbatches, timeout_s, device, captured)

    @property
    def steps(self) -> int:
        return STEPS + MORE_STEPS * self.captured

    @property
    def compile_s(self) -> float:
        """The longest that ranks may compile behind the fault."""
        return START_S if self.compiled and (self.place == "shard" or self.step <= 1) else 0.0

    @property
    def stopped_s(self) -> float:
        return {"stop": 0.3, "stop long": 1.2}.get(self.kind, 0.0) * self.timeout_s


class Here:
    """What this process does when it comes to the place; empty elsewhere."""

    place: str | None = None  # armed for this place and layer
    layer = 0
    fault: Fault
    pipe = None


def come_to(place: str, layer: int = 0) -> None:
    """Called at each place; acts if it is the one."""
    if Here.place != place or Here.layer != layer:
        return
    Here.place = None
    fault, pipe = Here.fault, Here.pipe
    pipe.send(("at",))
    if fault.kind == "raise":
        raise RuntimeError(f"broken on purpose on rank {fault.rank}")
    if fault.kind == "raise and go on":
        raise Injected
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.stopped_s:
        os.kill(os.getpid(), signal.SIGSTOP)  # the parent lets it go on


@torch.library.custom_op("zcompile_tests::chaos", mutates_args=())
def passes(x: torch.Tensor, layer: int, place: str) -> torch.Tensor:
    come_to(place, layer)
    return x.clone()


def _setup(ctx, inputs, output):
    ctx.layer = inputs[1]


passes.register_fake(lambda x, layer, place: torch.empty_like(x))
passes.register_autograd(lambda ctx, grad: (passes(grad, ctx.layer, "backward"), None, None), setup_context=_setup)


class Layer(nn.Linear):
    """Its values depend on `number` alone, on every device. It comes to a place when it is given values."""

    def __init__(self, number):
        self.number = number
        super().__init__(6, 6)

    @torch.no_grad()
    def reset_parameters(self):
        come_to("shard", self.number)
        generator = torch.Generator().manual_seed(self.number)
        for parameter in (self.weight, self.bias):
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, device="cpu"))


class Layers(nn.Module):
    """Layers with places between them; `extra` is read at every other batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))
        self.extra = Layer(LAYERS)
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        self.scale.fill_(1.5)

    def forward(self, x, branches: bool):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(passes(x, i, "forward")))
            if branches and i == 1:
                x = self.extra(x)
        return x * self.scale


def loss_of(model, number, rank):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank))
    device = next(model.parameters()).device
    x = x.to(device).requires_grad_()  # so that a backward comes to the first layer's place, too
    return model(x, number % 2 == 0).square().mean()


def make_optimizer(model):
    """Momentum makes each step depend on those before."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model, fault, rank):
    optimizer, taken = make_optimizer(model), []
    for step in range(fault.steps):
        is_here = (fault.rank, fault.step) == (rank, step)
        skipped = fault.place if is_here and fault.kind == "skip" else None
        if skipped:
            Here.pipe.send(("at",))
        taken.append([])
        for microbatch in range(fault.microbatches):
            number = step * fault.microbatches + microbatch
            if is_here and not skipped and microbatch == 0 and fault.place != "step":
                Here.place, Here.layer = fault.place, fault.layer
            if skipped == "forward":
                continue
            with contextlib.suppress(Injected):
                loss = loss_of(model, number, rank)
                if skipped != "backward":
                    loss.backward()
                    taken[-1].append(number)
        if is_here and not skipped and fault.place == "step":
            Here.place, Here.layer = "step", 0
        with contextlib.suppress(Injected):
            come_to("step")
            if skipped != "step":
                optimizer.step()
        optimizer.zero_grad()
    return taken


def rank_main(rank, fault, store, errors, pipe):
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    Here.fault, Here.pipe = fault, pipe
    try:
        pipe.send(("end", "ok", run_rank(rank, fault, store)))
        code = 0
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("end", "error", f"{type(error).__name__}: {error}"))
        code = 1
    os._exit(code)  # whatever still waits


def run_rank(rank, fault, store):
    """Trains; the batches of each step and the parameters in the end."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=fault.timeout_s)
    backend = "gloo" if fault.device == "cpu" else "nccl"
    if fault.device == "cuda":
        take_gpu(rank, WORLD)
    dist.init_process_group(backend, store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timeout)
    with torch.device("meta"):
        model = Layers()
    dist.barrier()  # from here on, ranks are as late as the fault makes them
    if (fault.place, fault.rank) == ("shard", rank):
        Here.place, Here.layer = "shard", fault.layer
    zcompile.shard(model, dist.init_device_mesh(fault.device, (WORLD,)))
    if fault.compiled:
        model.compile(backend="zcompile", options={"cuda_graphs": True} if fault.captured else {"inner": "aot_eager"})
    with graphs_on_cpu() if fault.captured else contextlib.nullcontext():
        taken = train(model, fault, rank)
    if fault.captured:
        assert zcompile.stats(model)["cuda_graphs"]["replays"] >= 2 * STEPS - 2
    if fault.device == "cuda":
        torch.cuda.synchronize()
        time.sleep(4 * PERIOD_S)  # over NCCL, ranks are compared once in a period, and told at the next collective
    with torch.no_grad():
        loss_of(model, 0, rank)  # an evaluation: a fault in the last step is seen here
        final = [parameter.full_tensor().tolist() for parameter in model.parameters()]
    dist.barrier()
    return taken, final


def expected(taken):
    """Parameters of the unsharded model after these batches, by rank and step."""
    model = Layers()
    optimizer = make_optimizer(model)
    for step in range(len(taken[0])):
        for rank in range(WORLD):
            for number in taken[rank][step]:
                (loss_of(model, number, rank) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def context(device="cpu"):
    """Ranks are forks of a process that has imported everything; on GPUs new processes, since CUDA refused forks."""
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.chaos"])
    return context


def run(fault):
    """Start the ranks, and wait until they have ended: for each one ("ok", (batches, parameters)), ("error", text),
    ("killed", text) or ("hung", text); and the seconds from the fault to the last end, None if no rank came to it."""
    for _ in range(3):  # on a slow machine, ranks that compile may reach the timeout before the fault
        with tempfile.TemporaryDirectory() as folder:
            answers, seconds = _run(fault, Path(folder))
        if seconds is not None:
            break
    return answers, seconds


def _run(fault, folder):
    processes, pipes = [], []
    for rank in range(WORLD):
        (folder / f"errors{rank}").touch()
        ours, theirs = context(fault.device).Pipe()
        args = (rank, fault, str(folder / "store"), str(folder / f"errors{rank}"), theirs)
        process = context(fault.device).Process(target=rank_main, args=args)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    answers, at, resume_at, deadline = [None] * WORLD, None, None, time.monotonic() + START_S
    while None in answers and time.monotonic() < deadline:
        if resume_at and time.monotonic() >= resume_at:
            os.kill(processes[fault.rank].pid, signal.SIGCONT)
            resume_at = None
        waiting = [pipe for pipe, answer in zip(pipes, answers, strict=True) if answer is None]
        for pipe in multiprocessing.connection.wait(waiting, timeout=0.05):
            rank = pipes.index(pipe)
            try:
                message = pipe.recv()
            except EOFError:
                message = ("end", "killed", "")
            if message[0] == "at":
                at = time.monotonic()
                deadline = at + 3 * fault.timeout_s + SLACK_S + fault.compile_s
                resume_at = at + fault.stopped_s if fault.stopped_s else None
            else:
                answers[rank] = message[1:]
    seconds = None if at is None else time.monotonic() - at
    for process, answer in zip(processes, answers, strict=True):
        if answer is None and process.is_alive():
            os.kill(process.pid, signal.SIGABRT)  # it tells where its threads are
            process.join(5)
        process.kill()
        process.join()
    texts = [(folder / f"errors{rank}").read_text() for rank in range(WORLD)]
    answers = [("hung", "") if answer is None else answer for answer in answers]
    return [(kind, what if kind == "ok" else f"{what}\n{text}") for (kind, what), text in zip(answers, texts)], seconds


PARAMETER = r"'(layers\.\d\.(weight|bias)|extra\.(weight|bias)|scale)'"


def check(fault, answers, seconds):
    kinds = [kind for kind, _ in answers]
    assert seconds is not None, f"{fault}: no rank came to the fault: {answers}"
    texts = "\n---\n".join(str(what) for kind, what in answers if kind != "ok")
    assert "hung" not in kinds, f"{fault}: {kinds}\n{texts}"
    if kinds == ["ok"] * WORLD:
        taken = [what[0] for _, what in answers]
        for _, (_, final) in answers:
            for ours, theirs in zip(final, expected(taken), strict=True):
                is_right = torch.allclose(torch.tensor(ours), theirs, rtol=1e-4, atol=1e-6)
                assert is_right, f"{fault}: {ours}, not {theirs}"
        return "right"
    assert "ok" not in kinds, f"{fault}: {kinds}\n{texts}"
    limit_s = 1.5 * fault.timeout_s + SLACK_S + fault.compile_s
    assert seconds <= limit_s, f"{fault}: ended after {seconds:.1f} s, not {limit_s:.1f} s\n{texts}"
    assert re.search(r"[Rr]ank \d", texts), f"{fault}: no rank is named\n{texts}"
    assert fault.place == "shard" or re.search(PARAMETER, texts), f"{fault}: no parameter is named\n{texts}"
    return "ended"
