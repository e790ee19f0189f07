"""Arguments that the profiler takes, operations that it counts, steps that it predicts, compares and divides."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.cli import COMMANDS, Parser, main
from zcompile.costs.hardware import H200
from zcompile.explanation.command import install_trace_readers
from zcompile.explanation.explanation import Explanation
from zcompile.explanation.llama import SIZES
from zcompile.explanation.planned_graph import PlannedGraph, in_order
from zcompile.explanation.planned_step import step_of
from zcompile.explanation.predict import predict_step
from zcompile.explanation.trace import trace
from zcompile.explanation.workloads import Workload, load
from zcompile.options import Settings
from zcompile.profile import compare, report
from zcompile.profile.command import job_of
from zcompile.profile.engines import file_name, find, names_of
from zcompile.profile.flops import flops_of, grouped_product_flops
from zcompile.profile.timeline import parts_of_step, wire_bytes
from zcompile.profile.torch_engines import blocks_of


def test_options_in_the_names_of_engines():
    inductor = {"max_autotune": True, "epilogue_fusion": False}
    given = f'skip_passes=["regather","bucket"]:inductor={json.dumps(inductor, separators=(",", ":"))}:transport=nccl'
    names = names_of(f"fsdp2,zcompile:{given},ddp")
    assert [name.partition(":")[0] for name in names] == ["fsdp2", "zcompile", "ddp"]
    assert find(names[1])[1] == {"skip_passes": ["regather", "bucket"], "inductor": inductor, "transport": "nccl"}
    assert re.fullmatch(r"[\w.=+-]+", file_name(names[1]))


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """A folder of configs as in a Hugging Face model's folder, which says in which dtype its weights are."""
    folder = tmp_path_factory.mktemp("configs")
    for name, more in (("llama", {"hidden_size": 32, "intermediate_size": 64, "attention_dropout": 0.1}), ("t5", {})):
        sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
        (folder / name).mkdir()
        config = {"model_type": name, "torch_dtype": "bfloat16", **sizes, **more}
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def test_hugging_face_models_are_fp32_and_without_dropout(configs):
    workload = load(f"{configs}/llama", None, 2, 16, False)
    assert {parameter.dtype for parameter in workload.model.parameters()} == {torch.float32}
    batch = workload.batch(0, 0)
    assert batch.shape == (2, 17) and torch.equal(workload.model(batch), workload.model(batch))
    assert not torch.equal(batch, workload.batch(0, 1)) and not torch.equal(batch, workload.batch(1, 0))


def test_blocks_are_of_the_outermost_lists():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    model = nn.ModuleDict({"layers": layers, "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    assert blocks_of(model) == [*layers, model["head"][0]]
    assert blocks_of(model["head"][0]) == [model["head"][0]]


def build():
    """What `--module` names below. Its arguments are refused before it is called."""
    raise AssertionError


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--engines", "zcompile,fast"], "no engine 'fast'; there are zcompile, zcompile+blocks"),
        (["--engines", "zcompile:fast=1"], "unknown option 'fast'"),
        (["--engines", "zcompile:transport"], "reads key=value, not 'transport'"),
        (["--engines", "zcompile:inductor=3"], "option 'inductor' must be a mapping"),
        (["--engines", "zcompile:skip_passes=[[1]]"], "option 'skip_passes' must be a list"),
        (["--engines", "zcompile:gather_budget_bytes=true"], "must be a whole number of bytes, at least 0, not True"),
        (["--engines", "limit:transport=nccl"], "engine 'limit' takes no options"),
        (["--engines", "fsdp2:transport=nccl"], "engine 'fsdp2' takes no option but offload"),
        (["--engines", "eager:bucket_bytes=0"], "engine 'eager' takes no option but transport, offload"),
        (["--engines", "zcompile:offload=all"], "offload is moments or states, not 'all'"),
        (["--model", "no/such model"], "no model 'no/such model': built in are tiny"),
        (["--model", "3B"], "no model of size '3B': built in are tiny"),
        (["--module", "missing.py:build"], "there is no file 'missing.py'"),
        (["--module", f"{__file__}:absent"], "has no function 'absent'"),
        (["--ranks", "0"], "must be at least 1"),
        (["--steps", "many"], "invalid"),
        (["--untraced", "--trace"], "--untraced leaves nothing"),
        (["--model", "7b", "--ranks", "1"], "GiB: take a smaller model"),
        (["--module", f"{__file__}:build", "--checkpointing"], "--checkpointing cannot be used"),
        (["--module", f"{__file__}:build", "--batch", "4"], "--batch and --tokens cannot be used"),
        (["--module", "Makefile:build"], "takes a Python file (.py), not Makefile"),
        (["--model", "FOLDER/t5"], "is no causal language model"),
        (["--model", "FOLDER/llama", "--tokens", "65"], "--tokens 65 is more than the 64 positions"),
    ],
)
def test_bad_input_is_one_line(arguments, says, capsys, tmp_path, configs):
    arguments = [argument.replace("FOLDER", str(configs)) for argument in arguments]
    with pytest.raises(SystemExit) as stopped:
        main(["profile", *arguments, "--output", str(tmp_path)])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and says in printed and printed.count("\n") == 1
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize(
    "batch, tokens",
    [
        ("torch.randint(9, (2, 8), generator=torch.Generator())", 16),
        ("{'input_ids': torch.zeros(3, 5, dtype=torch.int32), 'pixels': torch.zeros(4)}", 15),
        ("torch.zeros(2, 8)", None),
        ("{'pixels': torch.zeros(4)}", None),
        ("(torch.zeros(2, 8, dtype=torch.int64),)", None),
    ],
)
def test_tokens_of_a_users_batch_are_counted(batch, tokens, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(f"import torch\ndef build(): return torch.nn.Linear(2, 2), lambda step, rank: {batch}, None\n")
    with torch.device("meta"):  # as a GPU is the default where a model is made
        assert load("tiny", f"{file}:build", None, None, False).tokens == tokens


@pytest.mark.parametrize("precision, checkpointing", [("fp32", False), ("bf16", True), ("autocast", True)])
def test_a_decoder_takes_6n_and_12lds_operations_a_token(precision, checkpointing):
    """And no more under checkpoints, which compute blocks again. A lookup in the embedding is no product."""
    size, tokens = SIZES["tiny"], 2 * 64
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = load("tiny", None, 2, 64, checkpointing)
        counted = flops_of(workload, precision)
    weights = sum(parameter.numel() for parameter in workload.model.parameters() if parameter.ndim == 2)
    weights -= size.vocabulary * size.width
    assert counted == (6 * weights + 12 * size.layers * size.width * 64) * tokens


class Mixture(nn.Module):
    """Each token goes to two of eight experts, which are grouped products."""

    def __init__(self):
        super().__init__()
        self.first, self.router = nn.Linear(32, 32, bias=False), nn.Linear(32, 8, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(8, 32, 64)), nn.Parameter(torch.randn(8, 64, 32))

    def forward(self, x):
        x = self.first(x)
        scores, experts = self.router(x).topk(2)
        order = experts.flatten().argsort()
        ends = torch.zeros(8).scatter_add(0, experts.flatten(), torch.ones(experts.numel())).cumsum(0).int()
        hidden = torch._grouped_mm(x.repeat_interleave(2, 0)[order], self.up, ends)
        return (torch._grouped_mm(hidden, self.down, ends) * scores.flatten()[order, None]).sum()


def test_a_mixture_counts_the_experts_that_a_token_meets():
    with FakeTensorMode(allow_non_fake_inputs=True):
        counted = flops_of(Workload(Mixture(), lambda step, rank: torch.randn(48, 32), None), "bf16")
    first, router, of_two_experts = 2 * 32 * 32, 2 * 32 * 8, 2 * 2 * (32 * 64 + 64 * 32)
    assert counted == 48 * (2 * first + 3 * router + 3 * of_two_experts)  # nothing needs the gradient of the input


def test_grouped_products_of_two_stacks_count_each_group():
    assert grouped_product_flops(torch.Size((3, 5, 7)), torch.Size((3, 7, 11))) == 3 * 2 * 5 * 7 * 11


OWN = """
import torch
def build(): return torch.nn.Linear(4, 8, bias=False), lambda step, rank: torch.randn(16, 4), loss
def loss(model, batch): return model(batch).sum()
def build_that_looks(): return *build()[:2], lambda model, batch: loss(model, batch) * (1 + int(batch.sum() > 0))
def build_that_fails(): raise ValueError("no such weights\\non this machine")
"""


def counted_by(*arguments):
    return compare.count(job_of(Parser("profile", COMMANDS["profile"]).parse_args(arguments))[0])


def test_a_signal_waits_for_the_end_of_a_count(monkeypatch):
    """torch aborts if it comes while a fake tensor is dispatched."""
    counted = []

    def interrupted(job):
        signal.raise_signal(signal.SIGINT)
        counted.append(job)
        return {"parameters": 0}

    monkeypatch.setattr(compare, "count_step", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which pytest's workers ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            counted_by("--model", "tiny")
        assert counted and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def count_own(tmp_path):
    """What `zcompile profile` counts of a function in a file."""
    (tmp_path / "own.py").write_text(OWN)

    return lambda function: counted_by("--module", f"{tmp_path}/own.py:{function}", "--accumulation", "3")


def test_a_model_of_ones_own_is_counted(count_own):
    assert count_own("build") == {"parameters": 32, "flops": 3 * 2 * 2 * 16 * 32, "missing": []}


@pytest.mark.parametrize(
    "function, reason, parameters",
    [
        ("build_that_looks", "DataDependentOutputException: aten._local_scalar_dense.default", 32),
        ("build_that_fails", "ValueError: no such weights", None),
    ],
)
def test_a_model_that_cannot_be_counted_is_said_in_one_line(count_own, function, reason, parameters):
    counted = count_own(function)
    assert (counted["flops"], counted["parameters"]) == (None, parameters)
    says = [f"There is no MFU, because operations cannot be counted ({reason})."]
    assert report.predictions({"workload": counted, "engines": {}}) == says


def graph(kind, live, full, saved=0, ms=10.0):
    """A graph with `live` and `full` bytes at most."""
    return PlannedGraph(kind, 2, (), (), 0, 0, 0, ms - 0.25, 0.25, 0.0, full, full, live, saved)


def test_a_plan_of_a_step():
    """Forwards, then backwards in reverse. What others saved, and the first microbatch's gradients, lie beside each."""
    first = graph("forward", 100, 40), graph("backward", 80, 40, saved=16)
    graphs = (*first, graph("forward", 60, 20), graph("backward", 50, 20, saved=8))
    live_and_saved = [(ordered.live_bytes, saved) for ordered, saved in in_order(graphs)]
    assert live_and_saved == [(100, 0), (60, 16), (50, 16), (80, 0)]
    explained = Explanation(2, "nccl", "", 0, 10, graphs, 5.0, 45.0, 1.0, 1100, 1000, 20, 0.0, "guesses", (), 0)
    explained = replace(explained, activation_memory_budget=0.4)
    planned = step_of(explained, microbatches=2)
    assert (planned.saved_bytes, planned.activation_memory_budget) == (16 + 8, 0.4)
    assert (planned.step_ms, planned.rests_on) == (85.0, "guesses")
    assert step_of(replace(explained, adding_ms=3.0), microbatches=3).step_ms == 3 * 40 + 2 * 3 + 5
    assert planned.peak_bytes == 1000 + 100 + 4 * 10 // 2  # with gradients of the first microbatch beside the second
    assert step_of(explained, microbatches=1).peak_bytes == 1000 + 100


def test_a_plan_of_microbatches_that_share_gathers():
    """All forwards but the first find parameters unsharded, which lie beside them then."""
    graphs = graph("forward", 100, 40), graph("backward", 80, 40, saved=16)
    again = graph("forward", 70, 10, ms=8.0), graph("backward", 60, 10, saved=16, ms=6.0)
    explained = Explanation(2, "nccl", "", 0, 10, graphs, 5.0, 25.0, 0.5, 1100, 1000, 20, 3.0, "guesses", again, 30)
    assert step_of(explained, microbatches=1).step_ms == 25.0
    planned = step_of(explained, microbatches=2)
    assert planned.step_ms == 10 + 6 + 8 + 6 + 5
    # The cache and the gradients of the first microbatch, beside the forward and the backward of the second.
    assert planned.peak_bytes == 1000 + 30 + 20 + 70


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
def test_gradients_that_backward_left_count_in_the_optimizer_step(transport):
    """On two ranks, peer to peer, half of a shard's gradients lie in the place of cached shards."""
    linear = nn.Linear(1024, 1024, bias=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        names = install_trace_readers(Workload(linear, lambda step, rank: None, None), torch.bfloat16)
        plan = Settings().plan(H200.over(transport, 2), 1 << 34)
        x = torch.zeros(8, 1024, dtype=torch.bfloat16)
        traced = trace(lambda: linear(x).sum(), plan, lambda leaf: names.get(id(leaf)))
    explained = predict_step(traced, plan, 1024 * 1024, 1)
    assert explained.gradient_bytes == 1024 * 1024 * 4 // 2 // (2 if transport == "p2p" else 1)
    assert step_of(explained, 1).peak_bytes == explained.peak_bytes >= explained.static_bytes + explained.gradient_bytes
    idle = replace(explained, graphs=())
    assert step_of(idle, 1).peak_bytes == explained.static_bytes + explained.gradient_bytes


def test_a_loss_that_strays_is_marked():
    last = {"one": 2.0, "two": 2.0, "other": 2.1, "limit": 3.0, "none": float("nan")}
    # Engines that differ in options alone count as one.
    last |= {f"other:fit={i}": 2.1 for i in range(3)}
    engines = {name: {"losses": [3.0, loss]} for name, loss in last.items()}
    compare.mark_strays(engines, 1e-3)
    strays = {name: engine.get("strays") for name, engine in engines.items() if ":" not in name}
    assert strays == {"one": False, "two": False, "other": True, "limit": None, "none": True}


def test_a_failure_and_an_interruption_keep_what_there_is(tmp_path, monkeypatch, capsys):
    def run(job):
        if job.engine == "simplefsdp":
            raise compare.Failed("ValueError: no")
        if job.engine == "ddp":
            raise KeyboardInterrupt
        return {"step_ms": [1.0, 3.0, 2.0], "losses": [2.0, 1.0], "tokens": 8, "about": "2 x CPU", "peak_bytes": 1}

    monkeypatch.setattr(compare, "run", run)
    arguments = ["--engines", "simplefsdp,eager,ddp,fsdp2"]
    job, engines = job_of(Parser("profile", COMMANDS["profile"]).parse_args(arguments))
    results = compare.compare(job, {"parameters": None, "flops": None}, engines, 2, tmp_path)["engines"]
    assert results["eager"]["step_ms"]["median"] == 2.0 and results["eager"]["step_ms"]["repeats"] == [2.0]
    assert results["simplefsdp"] == {"failed": "ValueError: no"}
    assert results["ddp"] == results["fsdp2"] == {"failed": "interrupted"}
    assert "eager: 2.0 ms a step" in capsys.readouterr().err


def event(name, category, begin, end, thread=1, **args):
    """What takes time, from `begin` to `end` in microseconds, as torch's profiler writes it in a trace."""
    times = {"ts": begin, "dur": end - begin, "tid": thread, "args": {"stream": thread, **args}}
    return {"ph": "X", "name": name, "cat": category, **times}


STEP = event("zcompile.profile::step", "user_annotation", 0, 1000)

ON_GPU = [
    event("rotate", "kernel", 0, 0.5),
    event("gemm", "kernel", 100, 400),
    event("ncclDevKernel_AllGather", "kernel", 300, 600, 2),
    event("ncclDevKernel_AllReduce", "kernel", 550, 570),  # a norm, on the stream of compute
    event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 550, 650, 3),
    event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 560, 620, 4),
    event("void zcompile::cuda::cast_kernel<float, __nv_bfloat16>", "kernel", 600, 640, 3),
    event("void zcompile::cuda::adam_kernel<__nv_bfloat16>", "kernel", 700, 900),  # a step that writes copies
    event("adam", "kernel", 999.5, 1000),
]

ON_CPU = [
    STEP,
    event("aten::mm", "cpu_op", 100, 400),
    event("zcompile::gather_wait", "cpu_op", 400, 600),
    event("aten::copy_", "cpu_op", 450, 500),  # inside the wait
    event("gloo:all_gather", "user_annotation", 300, 650, 2),
    event("gloo:recv", "user_annotation", 50, 600),  # from its start to the wait
    event("aten::add", "cpu_op", 700, 900),
]

# The same from 100 us on in a CUDA graph, whose kernels are on streams of the driver's choice.
IN_GRAPH = [
    event("rotate", "kernel", 0, 0.5),
    event("cudaGraphLaunch", "cuda_runtime", 0, 50, correlation=7),
    event("gemm", "kernel", 100, 250, 5, correlation=7),
    event("gemm", "kernel", 250, 400, 6, correlation=7),
    event("memcpy128", "kernel", 300, 600, 6, correlation=7),  # of the driver: a copy within the device
    event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 550, 650, 6, correlation=7),
    event("Memset (Unknown)", "gpu_memset", 700, 900, 5, correlation=7),
    event("adam", "kernel", 999.5, 1000),
]


@pytest.mark.parametrize("events", [ON_GPU, IN_GRAPH, ON_CPU], ids=["gpu", "graph", "cpu"])
def test_parts_of_a_step(events):
    parts = parts_of_step({"traceEvents": events}, 1)
    assert (parts.step_ms, parts.compute_ms, parts.communication_ms) == pytest.approx((1.0, 0.5, 0.35), abs=2e-3)
    assert (parts.exposed_ms, parts.idle_ms) == pytest.approx((0.25, 0.25), abs=2e-3)
    assert parts.timeline["communication"] == [pytest.approx((0.3, 0.65))]
    assert parts.timeline["host link"] == ([pytest.approx((0.56, 0.62))] if events is ON_GPU else [])
    assert parts_of_step({"traceEvents": events}, 2).exposed_ms == parts.exposed_ms / 2
    faster = parts.at_speed(0.8)
    assert (faster.traced_ms, faster.step_ms, faster.idle_ms) == pytest.approx((1.0, 0.8, 0.05), abs=2e-3)
    slow = parts.at_speed(0.6)  # waits for another rank's host, which the trace slowed too
    assert (slow.step_ms, slow.compute_ms, slow.exposed_ms, slow.idle_ms) == pytest.approx((0.6, 0.5, 0.1, 0), abs=2e-3)
    assert parts.at_speed(0.4).step_ms == parts.compute_ms  # what the device computed is not denied


def test_bytes_on_the_wire():
    """On eight ranks: a gather to 8 x 100 in bf16, a scatter of 800 in fp32, a sum of 10. Barriers do not count."""

    def nccl(name, into, out, dtype):
        args = {"Collective name": name, "In msg nelems": into, "Out msg nelems": out, "dtype": dtype}
        return event("record_param_comms", "user_annotation", 0, 1, **args)

    counted = [nccl("_allgather_base", 100, 800, "BFloat16"), nccl("_reduce_scatter_base", 800, 100, "Float")]
    counted += [nccl("allreduce", 10, 10, "Float")]
    others = [nccl("barrier", 1, 1, "Byte"), nccl("broadcast", 5, 5, "Float")]
    assert wire_bytes({"traceEvents": counted + others}, 8) == 1600 + 3200 + 40

    def gloo(name, elements, dtype):
        args = {"Input Dims": [[elements // 2, 2]], "Input type": [dtype]}
        return event(f"gloo:{name}", "user_annotation", 0, 1, **args)

    events = [gloo("all_gather", 100, "c10::BFloat16"), gloo("all_reduce", 810, "float"), gloo("broadcast", 4, "float")]
    assert wire_bytes({"traceEvents": events}, 8) == 1600 + 3240
    messages = [gloo(name, 200, "byte") for name in ("send", "recv") for _ in range(7)]  # a gather to 8 x 100 in bf16
    assert wire_bytes({"traceEvents": messages}, 8) == 1600
