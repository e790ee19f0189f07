"""The profiler: what it adds up, what it says of engines that fail, and that its report can be looked at."""

import gzip
import html
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from PIL import Image
from torch import nn

from tests.support.browser import NoBrowser, look
from tests.support.models import Transformer, batch, loss_of
from zcompile.profile import compare, report
from zcompile.profile.__main__ import job_of, main, parser
from zcompile.profile.engines import RATE_STEPS, Training, file_name, find, names_of
from zcompile.profile.models import WithLoss, blocks_of, load
from zcompile.profile.timeline import Parts, clip, length, parts_of_step, subtract, union
from zcompile.profile.wire import wire_bytes
from zcompile.profile.worker import MOST_TRACES, Run

SHORT = ["--ranks", "2", "--steps", "3", "--warmup", "2", "--repeats", "1"]
ZERO3 = ["zero3"] if importlib.util.find_spec("deepspeed") else []


def test_intervals_against_points():
    """union, clip and subtract against sets of whole numbers."""
    generator = random.Random(0)

    def some():
        begins = [generator.randrange(40) for _ in range(generator.randrange(8))]
        return [(begin, begin + generator.randrange(1, 6)) for begin in begins]

    def points(intervals):
        return {point for begin, end in intervals for point in range(begin, end)}

    for _ in range(300):
        ones, others = some(), some()
        one, other = union(ones), union(others)
        assert points(one) == points(ones) and length(one) == len(points(ones))
        assert points(subtract(one, other)) == points(ones) - points(others)
        assert points(clip(one, (10, 25))) == points(ones) & set(range(10, 25))


def event(name, category, begin, end, thread=1):
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": begin,
        "dur": end - begin,
        "tid": thread,
        "args": {"stream": thread},
    }


STEP = event("zcompile.profile::step", "user_annotation", 0, 1000)
ON_GPU = [
    event("rotate", "kernel", 0, 0.5),
    event("gemm", "kernel", 100, 400),
    event("ncclDevKernel_AllGather", "kernel", 300, 600, 2),
    event("ncclDevKernel_AllReduce", "kernel", 550, 570),  # a norm, on the stream of compute
    event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 550, 650, 3),
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
    event("aten::add", "cpu_op", 700, 900),
]


@pytest.mark.parametrize("events", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
def test_parts_of_a_step(events):
    parts = parts_of_step({"traceEvents": events}, 1)
    assert (parts.step_ms, parts.compute_ms, parts.communication_ms) == pytest.approx((1.0, 0.5, 0.35), abs=2e-3)
    assert (parts.exposed_ms, parts.idle_ms) == pytest.approx((0.25, 0.25), abs=2e-3)
    assert parts.timeline["communication"] == [pytest.approx((0.3, 0.65))]
    assert parts_of_step({"traceEvents": events}, 2).exposed_ms == parts.exposed_ms / 2
    faster = parts.at_speed(0.8)
    assert (faster.traced_ms, faster.step_ms, faster.idle_ms) == pytest.approx((1.0, 0.8, 0.05), abs=2e-3)
    waiting = parts.at_speed(0.6)  # for another rank's host, which the trace slowed too
    assert (waiting.step_ms, waiting.compute_ms, waiting.exposed_ms, waiting.idle_ms) == pytest.approx(
        (0.6, 0.5, 0.1, 0.0), abs=2e-3
    )
    assert parts.at_speed(0.4).step_ms == parts.compute_ms  # what the device computed is not denied


def test_a_loss_that_strays_is_marked():
    engines = {
        "one": {"losses": [3.0, 2.0]},
        "two": {"losses": [3.0, 2.0]},
        "other": {"losses": [3.0, 2.1]},
        "limit": {"losses": [3.0, 3.0]},
    }
    engines["none"] = {"losses": [3.0, float("nan")]}
    engines |= {f"other:fit={at}": {"losses": [3.0, 2.1]} for at in range(3)}  # which counts as one
    compare.mark_strays(engines, 1e-3)
    engines = {name: one for name, one in engines.items() if ":" not in name}
    assert {name: one.get("strays") for name, one in engines.items()} == {
        "one": False,
        "two": False,
        "other": True,
        "limit": None,
        "none": True,
    }


def test_options_in_the_names_of_engines():
    text = 'fsdp2,zcompile:skip_passes=["regather","bucket"]:inductor={"max_autotune":true,"epilogue_fusion":false}:transport=nccl,ddp'
    names = names_of(text)
    assert [name.partition(":")[0] for name in names] == ["fsdp2", "zcompile", "ddp"]
    inductor = {"max_autotune": True, "epilogue_fusion": False}
    assert find(names[1])[1] == {"skip_passes": ["regather", "bucket"], "inductor": inductor, "transport": "nccl"}
    assert re.fullmatch(r"[\w.=+-]+", file_name(names[1]))


def test_an_interruption_keeps_what_there_is(tmp_path, monkeypatch):
    def run(job):
        if job.engine == "ddp":
            raise KeyboardInterrupt
        return {"step_ms": [1.0, 3.0, 2.0], "losses": [2.0, 1.0], "tokens": 8, "about": "2 x CPU"} | dict.fromkeys(
            ("peak_bytes", "reserved_bytes", "retries", "held_bytes"), 1
        )

    monkeypatch.setattr(compare.launch, "run", run)
    job, engines = job_of(parser().parse_args(["--engines", "eager,ddp,fsdp2"]))
    found = compare.compare(job, None, engines, 2, tmp_path)["engines"]
    assert found["eager"]["step_ms"]["median"] == 2.0 and found["eager"]["step_ms"]["repeats"] == [2.0]
    assert found["ddp"] == found["fsdp2"] == {"failed": "interrupted"}


OURS = "zcompile:inner=aot_eager"  # Inductor would take most of this module's time


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A folder with the report on all engines of these tests."""
    folder = tmp_path_factory.mktemp("profile")
    if ZERO3:  # which compiles an op for most of a minute: once, while other tests may want it too
        accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
        accelerator.create_op_builder("ShareMemCommBuilder").load()
        built = Path(os.environ["TORCH_EXTENSIONS_DIR"], "deepspeed_shm_comm")
        shutil.copytree(built, folder / "runs/extensions" / built.name, ignore=shutil.ignore_patterns("lock"))
    engines = ",".join([OURS, "limit", "fsdp2", "deepcompile", *ZERO3])
    batches = ["--tokens", "32", "--batch", "2", "--accumulation", "2"]
    assert main([*SHORT, "--engines", engines, *batches, "--trace", "--output", str(folder)]) == 0
    return folder


def test_results(profiled):
    results = json.loads((profiled / "results.json").read_text())
    engines = results["engines"]
    assert list(engines) == [OURS, "limit", "fsdp2", "deepcompile", *ZERO3]
    assert "needs CUDA" in engines["deepcompile"]["skipped"]
    for name in (OURS, "limit", "fsdp2"):
        one = engines[name]
        low, high = one["step_ms"]["quartiles"]
        assert 0 < low <= one["step_ms"]["median"] <= high and one["peak_bytes"] > 0
        parts = one["parts"]
        assert parts["compute_ms"] > 0.05 * parts["step_ms"]
        assert (parts["communication_ms"] > 0) == (name != "limit")
    assert len(engines[OURS]["losses"]) == 5
    assert engines[OURS]["losses"] == pytest.approx(engines["fsdp2"]["losses"], rel=1e-5)
    assert not engines[OURS]["strays"] and "strays" not in engines["limit"]
    assert engines["limit"]["x_limit"] == 1.0
    parameters = results["workload"]["parameters"]
    # Each of two micro-steps: forward gathers all, backward all that it reads (not the embedding) and that did not stay full
    # (the head and the norm before it), and gradients are reduced.
    embedding, kept = 2048 * 192, 2048 * 192 + 192
    assert engines[OURS]["wire_bytes"] == 2 * 4 * (3 * parameters - embedding - kept)
    assert engines[OURS]["tokens"] == 2 * 2 * 2 * 32
    assert results["workload"]["flops"] > 6 * 2 * 64 * (
        parameters - embedding
    )  # 2 x 3 a token and weight, and attention


def test_memory_by_kind(profiled):
    results = json.loads((profiled / "results.json").read_text())
    shard = 4 * results["workload"]["parameters"] // 2  # fp32, two ranks
    embedding = 4 * 2048 * 192
    for name in (OURS, "limit", "fsdp2", *ZERO3):
        memory = results["engines"][name]["memory"]
        sums = [sum(at) for at in zip(*memory["kinds"].values())]
        assert sum(memory["at_peak"].values()) == max(sums) and memory["allocator_bytes"] is None
        assert memory["ms"] == sorted(memory["ms"]) and len(memory["ms"]) <= 402
        assert memory["ms"][sums.index(max(sums))] == memory["peak_ms"]
        kept = {
            "limit": 3 * shard,
            "zero3": 2 * shard,
        }  # all parameters, and a share to have Adam's state of; partitions and masters
        assert set(memory["kinds"]["shards"]) == {kept.get(name, shard)}
        (state,) = set(memory["kinds"]["optimizer"])
        assert state == pytest.approx(2 * shard, abs=4 * 39)  # and the number of steps
        assert (max(memory["kinds"]["full"]) > 0) == (name != "limit")
        assert max(memory["kinds"]["activations"]) > 4 * 2 * 32 * 2048  # logits
        gradients = memory["kinds"]["gradients"]
        held = shard if name in ("limit", "zero3") else 0  # between steps: a share's gradient, and DeepSpeed's buffer
        assert gradients[-1] == held and max(gradients) >= shard + held
    zcompile = results["engines"][OURS]
    full = zcompile["memory"]["kinds"]["full"]
    static = zcompile["memory"]["kinds"]["shards"][0] + zcompile["memory"]["kinds"]["optimizer"][0]
    assert (
        max(full) == 2 * shard - embedding
    )  # all but the head, which is as large and is gathered when others have gone
    plan = zcompile["plan"]
    assert max(nbytes for _, _, nbytes in plan["memory"]) - static == pytest.approx(max(full), rel=1e-3)
    assert plan["peak_bytes"] == max(nbytes for _, nbytes, _ in plan["memory"]) and plan["step_ms"] == pytest.approx(
        plan["memory"][-1][0]
    )


def test_windows_and_traces(profiled):
    results = json.loads((profiled / "results.json").read_text())
    assert [name for name, one in results["engines"].items() if one.get("windows")] == [OURS]
    found = results["engines"][OURS]["windows"]
    assert len({one["parameter"] for one in found["windows"]}) == 20 and len(found["streams"]) >= 2
    assert all(0 <= one["begin_ms"] < one["end_ms"] <= found["step_ms"] for one in found["windows"])
    windows = [
        one
        for one in found["windows"]
        if one["parameter"] in ("embedding.weight", "head.weight", "blocks.0.gate.weight")
    ]
    counts = Counter((one["parameter"], one["nbytes"]) for one in windows)  # in two micro-steps
    assert counts == {
        ("embedding.weight", 4 * 2048 * 192): 2,  # backward does not read it
        ("head.weight", 4 * 2048 * 192): 2,  # it stays full for backward
        ("blocks.0.gate.weight", 4 * 512 * 192): 4,
    }
    for name in (OURS, "limit", "fsdp2"):
        events = json.loads(gzip.decompress((profiled / f"{file_name(name)}.trace.json.gz").read_bytes()))[
            "traceEvents"
        ]
        assert sum(event.get("name") == "zcompile.profile::step" for event in events) == 2


def test_bytes_on_the_wire_by_trace_and_by_arithmetic(profiled):
    """FSDP2 gathers each block twice in a micro-step and what is in none of them once; zcompile's own count is that of gloo's events."""
    results = json.loads((profiled / "results.json").read_text())
    model = load("tiny", None, 2, 32, False).model
    sizes = {name: padded(parameter) for name, parameter in model.named_parameters()}
    blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
    assert results["engines"]["fsdp2"]["wire_bytes"] == 2 * 4 * (2 * sum(sizes.values()) + blocks)
    trace = json.loads(gzip.decompress((profiled / f"{file_name(OURS)}.trace.json.gz").read_bytes()))
    assert wire_bytes(trace, 2) / 2 == pytest.approx(
        results["engines"][OURS]["wire_bytes"], rel=1e-3
    )  # ranks also agree on what to gather
    assert results["engines"]["limit"]["wire_bytes"] == 0


def padded(parameter):
    """Elements, with rows for two equal shards."""
    rows = parameter.shape[0]
    return parameter.numel() // rows * (rows + rows % 2)


def test_plans_beside_measurements(profiled):
    results = json.loads((profiled / "results.json").read_text())
    (told,) = report.predictions(results)
    plan = results["engines"][OURS]["plan"]
    assert f"predicted a step of {plan['step_ms']:.1f} ms" in told and plan["rests_on"] in told
    assert told in html.unescape((profiled / "report.html").read_text())


def test_a_picture_of_nothing_is_left_out(profiled, tmp_path):
    results = json.loads((profiled / "results.json").read_text())
    results["engines"] = {"limit": results["engines"]["limit"] | {"memory": None}}
    names = {one.stem for one in report.write(results, tmp_path) if one.suffix == ".png"}
    assert set(report.PICTURES) - names == {"kinds", "windows"}


def looked_at(page, folder):
    """What a browser's console is told by `page`, and of each picture how wide and high it is shown, and with how many colored pixels."""
    where = "[...document.querySelectorAll('figure svg')].map(one => {const r = one.getBoundingClientRect(); return [r.x, r.y, r.right, r.bottom]})"
    script = f"<script>document.body.dataset.where = JSON.stringify({where})</script></body>"
    (folder / "page.html").write_text(page.replace("</body>", script))
    try:
        console, dom = look(folder / "page.html", folder / "page.png")
    except NoBrowser as reason:
        pytest.skip(f"no browser: {reason}")
    shown = Image.open(folder / "page.png").convert("RGB")
    pictures = []
    for place in json.loads(re.search(r'data-where="([^"]*)"', dom)[1]):
        seen = shown.crop(tuple(round(edge) for edge in place))
        colors = seen.getcolors(maxcolors=1 << 20)
        colored = sum(
            count for count, (red, green, blue) in colors if max(red, green, blue) - min(red, green, blue) > 40
        )
        pictures.append((seen.width, seen.height, colored))
    return console, pictures


def test_report_in_a_browser(profiled, tmp_path):
    """Every picture has something in it, and nothing on the page complains; where they do, it is seen."""
    page = (profiled / "report.html").read_text()
    console, pictures = looked_at(page, tmp_path)
    assert not console and len(pictures) == len(report.PICTURES)
    for width, height, colored in pictures:
        assert width > 400 and height > 50 and colored > 200, pictures
    broken = re.sub(r"(<figure id=\"memory\"><svg[^>]*>).*?(?=</svg>)", r"\1", page, flags=re.DOTALL)
    console, emptied = looked_at(broken.replace("</body>", "<script>absent()</script></body>"), tmp_path)
    assert "absent is not defined" in console
    assert [colored > 200 for *_, colored in emptied] == [name != "memory" for name in report.PICTURES]


def losses_of(rank, world, engine):
    """Of four steps of a model with tied weights and a scalar, not compiled; and of the same on one rank with everybody's batches."""
    found = []
    for name in (engine, None):
        torch.manual_seed(0)
        model = WithLoss(Transformer(), loss_of)
        if name:
            with torch.compiler.set_stance("force_eager"):
                trained = find(name)[0].make(model, Training("fp32", 1e-2, 1), {})
                found.append([trained.step([batch(step, rank)]) for step in range(4)])
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
            found.append([])
            for step in range(4):
                optimizer.param_groups[0]["lr"] = 1e-2 * (step + 1) / RATE_STEPS
                losses = [model(batch(step, of)) for of in range(world)]
                torch.stack(losses).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                found[-1].append(losses[rank].detach())
    return [[loss.item() for loss in losses] for losses in found]


@pytest.mark.parametrize("engine", ["simplefsdp", "ddp", "eager"])
def test_engines_train_as_one_rank_does(ranks, engine):
    for ours, theirs in ranks(2).run(losses_of, engine):
        assert ours == pytest.approx(theirs, rel=1e-5) and ours[0] != pytest.approx(ours[-1], rel=1e-3)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Configs as they lie in a Hugging Face model's folder, which says in which dtype its weights are."""
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


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_profiler(tmp_path, by):
    (tmp_path / "mine.py").write_text(FAILING)
    arguments = [*SHORT, "--module", f"{tmp_path}/mine.py:build", "--engines", "limit", "--output", str(tmp_path)]
    profiler = subprocess.Popen([sys.executable, "-m", "zcompile.profile", *arguments], stdout=subprocess.DEVNULL)

    def ranks():
        return [
            one
            for one in psutil.process_iter(["cmdline"])
            if str(tmp_path) in " ".join(one.info["cmdline"] or []) and one.pid != profiler.pid
        ]

    wait_for(lambda: len(ranks()) == 2)
    profiler.send_signal(by)
    assert profiler.wait(20) == (-signal.SIGKILL if by == signal.SIGKILL else 128 + by)
    if by == signal.SIGTERM:  # as a time limit sends it, after which what was measured is still there
        assert json.loads((tmp_path / "results.json").read_text())["engines"] == {"limit": {"failed": "interrupted"}}
    wait_for(lambda: not ranks())


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


FAILING = """
import json, os, signal, sys, time
import torch
from torch import nn

def build():
    engine = json.load(open(sys.argv[1]))["engine"]  # where a worker's job is
    rank = int(os.environ["RANK"])
    def batch(step, rank):
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    def loss(model, batch):
        if engine == "fsdp2" and rank == 1:
            raise ValueError("the second rank does not like this batch\\nat all")
        if engine == "ddp" and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if engine == "limit":
            time.sleep(1000)
        return model(batch).square().mean()
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), batch, loss
"""


def test_engines_that_fail_leave_the_others(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FAILING)
    arguments = [
        "--module",
        f"{tmp_path}/mine.py:build",
        "--engines",
        "fsdp2,ddp,limit,eager",
        "--timeout",
        "20",
        "--output",
        str(tmp_path),
    ]
    assert main([*SHORT, *arguments]) == 0
    engines = json.loads((tmp_path / "results.json").read_text())["engines"]
    assert engines["fsdp2"]["failed"] == "ValueError: the second rank does not like this batch"
    assert "SIGKILL" in engines["ddp"]["failed"] and "no result within 20 s" in engines["limit"]["failed"]
    assert len(engines["eager"]["losses"]) == 5
    told = capsys.readouterr().out
    assert "the second rank does not like this batch" in told and "eager" in told


def test_a_plan_that_fails_on_one_rank_takes_nothing_with_it(tmp_path):
    """The other rank is in the forward by then, and waits."""
    (tmp_path / "mine.py").write_text(
        FAILING
        + """
import zcompile
explain = zcompile.explain
def fails(*args, **kwargs):
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("no room for a plan")
    return explain(*args, **kwargs)
zcompile.explain = fails
"""
    )
    engine = 'zcompile:inner=aot_eager:skip_passes=["bucket"]'
    arguments = ["--module", f"{tmp_path}/mine.py:build", "--engines", engine, "--output", str(tmp_path)]
    assert main([*SHORT, *arguments]) == 0
    one = json.loads((tmp_path / "results.json").read_text())["engines"][engine]
    assert one["plan"] is None and one["memory"] and len(one["losses"]) == 5
    assert one["missing"] == ["plan (OutOfMemoryError: no room for a plan)"]
    assert "there is no plan (OutOfMemoryError" in (tmp_path / "report.html").read_text()


def test_the_example_of_a_model_of_ones_own(tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples/profile.py"
    run = subprocess.run(
        [sys.executable, example, *SHORT, "--engines", "eager", "--output", tmp_path], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    losses = json.loads((tmp_path / "results.json").read_text())["engines"]["eager"]["losses"]
    assert len(losses) == 5 and all(2.0 < loss < 4.0 for loss in losses)  # ten classes: log(10) and noise


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--engines", "zcompile,fast"], "no engine 'fast'; there are zcompile, limit"),
        (["--engines", "zcompile:fast=1"], "unknown option 'fast'"),
        (["--engines", "zcompile:transport"], "reads key=value, not 'transport'"),
        (["--engines", "zcompile:inductor=3"], "option 'inductor' must be a mapping"),
        (["--engines", "zcompile:skip_passes=[[1]]"], "option 'skip_passes' must be a list"),
        (["--engines", "zcompile:gather_budget_bytes=true"], "must be a whole number of bytes, at least 0, not True"),
        (["--engines", "fsdp2:transport=nccl"], "engine 'fsdp2' takes no options"),
        (["--model", "no/such model"], "no model 'no/such model': built in are tiny"),
        (["--model", "3B"], "no model of size '3B': built in are tiny"),
        (["--module", "missing.py:build"], "there is no file 'missing.py'"),
        (["--module", f"{__file__}:absent"], "has no function 'absent'"),
        (["--ranks", "0"], "must be at least 1"),
        (["--steps", "many"], "invalid"),
        pytest.param(
            ["--snapshot"],
            "--snapshot needs a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (["--model", "7b", "--ranks", "1"], "take more ranks or a smaller model"),
        (["--module", f"{__file__}:event", "--checkpointing"], "--checkpointing has no meaning"),
        (["--module", f"{__file__}:event", "--batch", "4"], "--batch and --tokens have no meaning"),
        (["--module", "Makefile:build"], "is none"),
        (["--model", "FOLDER/t5"], "is no causal language model"),
        (["--model", "FOLDER/llama", "--tokens", "65"], "--tokens 65 is more than the 64 positions"),
    ],
)
def test_bad_input_is_one_line(arguments, says, capsys, tmp_path, configs):
    arguments = [argument.replace("FOLDER", str(configs)) for argument in arguments]
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--output", str(tmp_path)])
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and says in told and told.count("\n") == 1
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize(
    "traced_ms, taken", [([10.4, 9.0], 10.4), ([20.0, 10.6], 10.6), ([20.0, 13.0, 14.0, 10.0], 13.0)]
)
def test_a_slow_trace_is_made_again(monkeypatch, traced_ms, taken):
    """Of steps of 10.5 ms: the first trace that is about as fast, or of the most there are the fastest."""
    times = iter(traced_ms)
    run = object.__new__(Run)
    run.cuda, run.job = True, SimpleNamespace(trace=True)
    run.traced = lambda: Parts(0.0, next(times), 0.0, 0.0, 0.0, 0.0, {})
    monkeypatch.setattr("zcompile.profile.worker.dist.broadcast_object_list", lambda objects: None)
    monkeypatch.setattr("zcompile.profile.worker.dist.get_rank", lambda: 0)
    assert run.parts(10.5).traced_ms == taken
    assert MOST_TRACES == 3
