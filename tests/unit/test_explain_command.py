"""`zcompile explain`, without ranks; and which attention a graph has that is traced on the CPU for a GPU."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._higher_order_ops import triton_kernel_wrap
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tests.support.commands import explained
from tests.support.ranks import slow_case
from zcompile.calibration.results import Calibration
from zcompile.cli import main
from zcompile.costs.hardware import H100, TABLES
from zcompile.explanation.hosts import OnHosts, table_of_hosts
from zcompile.explanation.llama import SIZES
from zcompile.explanation.without_gpu import DeviceAttention
from zcompile.explanation.workloads import load


@pytest.fixture(autouse=True)
def two_layers(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], layers=2))


def test_a_plan_agrees_with_the_model_and_with_itself(tmp_path, capsys):
    arguments = ["--model", "tiny", "--tokens", "32", "--ranks", "2,4096", "--budgets", "0,1"]
    written = explained(tmp_path, *arguments, "--activation-budgets", "1,0.4")
    told = capsys.readouterr().out
    assert "embedding.weight" in told and "4096" in told and "graph breaks" not in told
    two, many = written["ranks"]
    assert two["peak_bytes"] > many["peak_bytes"] and two["step_ms"] < many["step_ms"]
    parameters = sum(parameter.numel() for parameter in load("tiny", None, None, None, False).model.parameters())
    assert two["parameters"] == many["parameters"] == parameters
    forward = two["graphs"][0]
    (embedding,) = forward["rows"]
    table = load("tiny", None, None, None, False).model.embedding.weight
    assert embedding == {"parameter": "embedding.weight", "dtype": "bfloat16", "nbytes": 2 * 8 * 32 * table.shape[1]}
    assert sum(gather["nbytes"] for gather in forward["gathers"]) == 2 * (parameters - table.numel())
    assert forward["gathered_bytes"] == sum(gather["nbytes"] for gather in forward["gathers"] + forward["rows"])
    graphs = [graph for plan in written["budgets"] for graph in plan["graphs"]]
    assert all(graph["unsharded_bytes"] <= graph["bound_bytes"] for graph in graphs)
    all_of_them, less = written["activation_budgets"]
    assert two["activation_memory_budget"] == all_of_them["activation_memory_budget"] == 1.0
    assert all_of_them["graphs"] == two["graphs"] and "activation_memory_budget 1." in told
    assert less["activation_memory_budget"] == 0.4 and "activation budget" in told
    assert less["graphs"][1]["saved_bytes"] < 0.6 * two["graphs"][1]["saved_bytes"]
    for graph in two["graphs"]:
        assert 0 < graph["unsharded_bytes"] <= min(graph["gathered_bytes"], graph["live_bytes"])
        assert (graph["reduced_bytes"] > 0) == (graph["kind"] == "backward")


@pytest.mark.parametrize("dtype, width, says", [slow_case("float8", 1, "float8, 1 b"), ("int8", 65 / 64, ", 1.016 b")])
def test_narrow_gathers_have_fewer_bytes_and_int8_is_dequantized(dtype, width, says, tmp_path, capsys):
    arguments, hardware = ["--model", "tiny", "--ranks", "4", "--transport", "nccl"], TABLES["h200"]
    plans = [explained(tmp_path, *arguments, *more)["ranks"][0] for more in ([], ["--gather-dtype", dtype])]
    told = capsys.readouterr().out
    assert "as bfloat16, 2 bytes each" in told and says in told
    for before, after in zip(*(plan["graphs"] for plan in plans), strict=True):
        nbytes, starts = sum(each["nbytes"] for each in after["gathers"]), {each["starts"] for each in after["gathers"]}
        assert before["gathered_bytes"] - after["gathered_bytes"] == pytest.approx(nbytes * (1 - width / 2), abs=1)
        made_s = len(starts) * hardware.kernel_s + nbytes * (1 + width / 2) / hardware.bytes_s
        made_ms = 1e3 * made_s if dtype == "int8" else 0
        assert after["compute_ms"] == pytest.approx(before["compute_ms"] + made_ms)


@pytest.mark.slow
def test_a_limit_of_memory_is_kept_on_each_number_of_ranks(tmp_path):
    """More memory is never slower."""
    arguments = ["--model", "tiny", "--ranks", "2,4", "--transport", "nccl", "--hardware", "h100"]
    free = explained(tmp_path, *arguments)["ranks"]
    limits = [round(share * free[0]["peak_bytes"]) for share in (1.05, 0.97, 0.93)]
    plans = [explained(tmp_path, *arguments, "--memory-limit", str(limit))["ranks"] for limit in limits]
    assert [plan["activation_memory_budget"] for plan in plans[0]] == [1.0, 1.0]
    for limit, (two, four) in zip(limits, plans):
        assert two["peak_bytes"] <= limit and four["peak_bytes"] <= limit
        assert four["activation_memory_budget"] >= two["activation_memory_budget"]
    assert plans[0][0]["step_ms"] < plans[1][0]["step_ms"] < plans[2][0]["step_ms"]


def test_modes_over_hosts_are_compared(tmp_path, capsys):
    """Bytes from other hosts are those of the formulas in docs/guide.md, and a faster network is never slower."""
    arguments = ["--model", "tiny", "--gpus", "4", "--hosts", "2,16"]
    slow, fast = (explained(tmp_path, *arguments, "--network", each)["hosts"] for each in ("100", "800"))
    assert capsys.readouterr().out.count("fastest that fits") == 4
    shard = sum(each.numel() for each in load("tiny", None, None, None, False).model.parameters()) / 4
    for hosts, (zero3, hsdp, both) in ((2, slow[:3]), (16, slow[3:])):
        others = shard * (hosts - 1) / hosts
        assert (zero3["hosts"], zero3["gpus"], both["mode"]) == (hosts, 4, 'states="global"')
        assert hsdp["crossing_bytes"] == pytest.approx(8 * others, rel=1e-5)
        assert both["crossing_bytes"] == pytest.approx(6 * others, rel=1e-5)
        assert 4 * others < zero3["crossing_bytes"] < 6 * others  # rows of the embedding, and what forward saves
        assert zero3["peak_bytes"] < both["peak_bytes"] < hsdp["peak_bytes"]
    assert all(one["exposed_ms"] >= other["exposed_ms"] for one, other in zip(slow, fast, strict=True))
    several = explained(tmp_path, *arguments, "--microbatches", "3")["hosts"]
    assert [row["crossing_bytes"] for row in several[1:3]] == [row["crossing_bytes"] for row in slow[1:3]]
    assert several[0]["crossing_bytes"] > 1.5 * slow[0]["crossing_bytes"]


def test_the_fastest_mode_that_fits_is_marked():
    modes = (("a", 3, True), ("b", 1, False), ("c", 2, True))
    rows = [OnHosts(2, 8, name, ms, 0.0, 0, 0, fits) for name, ms, fits in modes]
    told = table_of_hosts(rows).splitlines()
    assert [line.endswith("fastest that fits") for line in told] == [False, False, False, True]


def test_one_rank_casts_parameters_instead_of_gathering_them(tmp_path):
    """Casts take time, and gathers among one rank would take none. Nothing moves peer to peer."""
    several, one, others = explained(tmp_path, "--model", "tiny", "--tokens", "16", "--ranks", "2,1,64")["ranks"]
    assert [plan["transport"] for plan in (several, one, others)] == ["p2p", "nccl", "nccl"]
    assert all(not graph["gathers"] and graph["gathered_bytes"] == 0 for graph in one["graphs"])
    assert all(graph["gathers"] for plan in (several, others) for graph in plan["graphs"])
    cast_ms = 1e3 * 6 * one["parameters"] / TABLES["h200"].bytes_s
    alone, among_two = (sum(graph["compute_ms"] for graph in plan["graphs"]) for plan in (one, several))
    assert alone >= among_two + cast_ms


def test_a_machine_near_its_table_has_the_plan_of_the_table_and_predictions_of_its_own(tmp_path, capsys):
    """10 % faster in all that counts for compute: a step is about that much shorter, and starts stay."""
    table = TABLES["h200"]
    calibration = Calibration(
        device="NVIDIA H200", driver="13000", torch=torch.__version__, world=2, memory_bytes=table.memory_bytes,
        matmul_flops_s=tuple((str(dtype)[6:], 1.1 * rate) for dtype, rate in table.matmul_flops_s), grouped_share=None,
        attention_flops_s=(), bytes_s=1.1 * table.bytes_s, adam_bytes_s=0.9 * table.adam_rate(),
        kernel_s=table.kernel_s / 1.1, wires=(),
    )  # fmt: skip
    (tmp_path / "machine.json").write_text(calibration.to_json())
    plans = []
    for hardware in ("h200", str(tmp_path / "machine.json")):
        arguments = ["--model", "tiny", "--tokens", "16", "--ranks", "2", "--hardware", hardware]
        plans += explained(tmp_path, *arguments)["ranks"]
    of_table, measured = plans
    places = ("starts", "arrives", "dies", "bucket")
    gathers = [[gather for graph in plan["graphs"] for gather in graph["gathers"]] for plan in plans]
    starts = [[[gather[place] for place in places] for gather in of_plan] for of_plan in gathers]
    assert starts[0] == starts[1] and len(starts[0]) > 20
    for mine, theirs in zip(measured["graphs"], of_table["graphs"], strict=True):
        assert mine["compute_ms"] == pytest.approx(theirs["compute_ms"] / 1.1, rel=0.03)
    assert measured["optimizer_ms"] == pytest.approx(of_table["optimizer_ms"] / 0.9, rel=0.02)
    assert "measured by zcompile calibrate on NVIDIA H200" in measured["rests_on"]


class Breaks(nn.Module):
    """Has a graph break between parameters of its own, which runs in eager."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(64, 64)) for _ in range(2))

    def forward(self, x):
        x = x @ self.first
        torch._dynamo.graph_break()
        return x @ self.second


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = Breaks(), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(self.inner(x)).sum()


def breaks():
    return Around(), lambda step, rank: torch.ones(4, 64), lambda model, x: model(x)


def skipped():
    model, batch, loss = breaks()
    model.inner.forward = torch.compiler.disable(model.inner.forward)
    return model, batch, loss


@pytest.mark.parametrize("build", [breaks, skipped])
def test_what_runs_between_graphs_is_left_out(build, tmp_path, capsys):
    (plan,) = explained(tmp_path, "--module", f"{__file__}:{build.__name__}", "--ranks", "2")["ranks"]
    gathered = {gather["parameter"] for graph in plan["graphs"] for gather in graph["gathers"]}
    assert "model.last.weight" in gathered
    assert "The model has graph breaks, so no figure counts all of it (" in capsys.readouterr().out
    assert ("model.inner.first" in gathered) is ("model.inner.second" in gathered) is (build is breaks)


def pair():
    return 1, 2


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--ranks", "0"], "--ranks takes whole numbers"),
        (["--ranks", "2,many"], "--ranks takes whole numbers"),
        (["--hosts", "1"], "--hosts takes whole numbers from 2"),
        (["--model", "no/such model"], "no model 'no/such model'"),
        (["--hardware", "abacus"], "--hardware takes h200, h100, cpu or a file"),
        (["--hardware", __file__], "the file is no JSON"),
        (["--budgets", "-1"], "--budgets takes"),
        (["--activation-budgets", "1,2"], "--activation-budgets takes numbers from 0 to 1"),
        (["--activation-budgets", "half"], "--activation-budgets takes numbers from 0 to 1"),
        (["--save-for-backward", "-1"], "--save-for-backward takes"),
        (["--memory-limit", "much"], "--memory-limit: takes a size such as 70GiB, not 'much'"),
        slow_case(*(["--model", "tiny", "--memory-limit", "60MiB"], "memory_limit, 60.0 MiB. The least found is")),
        (["--transport", "ncll"], "--transport must be one of p2p, nccl on H200, not 'ncll'"),
        (["--transport", "p2p", "--ranks", "16"], "p2p reaches the 8 ranks"),
        (["--transport", "p2p", "--gather-dtype", "int8"], "are gathered by NCCL, not peer to peer: take --transport"),
        (["--module", f"{__file__}:pair"], "must return a module, batch"),
    ],
)
def test_bad_input_is_one_line(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["explain", *arguments])
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and says in told and told.count("\n") == 1


WITHOUT_CUDNN, OF_NARROW_HEADS = (replace(H100, widest_cudnn_head=width) for width in (0, 128))  # as A100, B200
EFFICIENT, CPU_FLASH = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu"
CUDNN = "_scaled_dot_product_cudnn_attention"


def ops_of(widths, dtype=torch.bfloat16, mask=False, hardware=WITHOUT_CUDNN, **how):
    """The names of the attention ops, forward and backward, of heads whose queries and values have `widths`."""
    with FakeTensorMode():
        query, key = (torch.empty(2, 4, 64, widths[0], dtype=dtype, requires_grad=True) for _ in range(2))
        value = torch.empty(2, 4, 64, widths[1], dtype=dtype, requires_grad=True)
        if mask:
            how["attn_mask"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)

        def step(query, key, value):
            out = scaled_dot_product_attention(query, key, value, **how)
            return out, *torch.autograd.grad(out.sum(), (query, key, value))

        with DeviceAttention(hardware):
            gm = make_fx(step)(query, key, value)
    names = [str(node.target).split(".")[1] for node in gm.graph.nodes if "dot_product" in str(node.target)]
    shapes = [tuple(node.meta["val"].shape) for node in gm.graph.output_node().args[0]]
    assert shapes == [(2, 4, 64, widths[1]), *((2, 4, 64, width) for width in (widths[0], *widths))]
    return names


@pytest.mark.parametrize(
    "case, kernel",
    [
        ({"widths": (64, 64), "is_causal": True}, CPU_FLASH),
        ({"widths": (192, 128), "is_causal": True}, EFFICIENT),
        ({"widths": (64, 64), "mask": True}, EFFICIENT),
        ({"widths": (64, 64), "dropout_p": 0.1}, EFFICIENT),
        ({"widths": (64, 64), "dtype": torch.float32}, CPU_FLASH),
        ({"widths": (64, 64), "is_causal": True, "hardware": H100}, CUDNN),
        ({"widths": (192, 128), "mask": True, "hardware": H100}, CUDNN),
        ({"widths": (192, 128), "is_causal": True, "hardware": OF_NARROW_HEADS}, EFFICIENT),
        ({"widths": (64, 64), "dtype": torch.float32, "hardware": H100}, CPU_FLASH),
    ],
)
def test_attention_is_the_kernel_that_a_gpu_has_for_it(case, kernel):
    assert ops_of(**case) == [kernel, f"{kernel}_backward"]


def test_what_no_kernel_fits_stays_plain_matmuls():
    assert ops_of((20, 12)) == []


class LatentAttention(nn.Module):
    """Heads whose values are narrower than their queries, as in DeepSeek-V3."""

    def __init__(self, heads=8, queries=192, values=128):
        super().__init__()
        self.heads, self.queries, self.values = heads, queries, values
        self.project = nn.Linear(64, heads * (2 * queries + values))

    def forward(self, x):
        parts = self.project(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        query, key, value = parts.split([self.queries, self.queries, self.values], -1)
        return scaled_dot_product_attention(query, key, value, is_causal=True)


def latent():
    return LatentAttention(), lambda step, rank: torch.randn(1, 4096, 64), lambda model, x: model(x).float().mean()


def graphs_of(folder, module, *arguments):
    """What `zcompile explain` says of a module's graphs on two ranks."""
    (plan,) = explained(folder, "--module", module, "--ranks", "2", *arguments)["ranks"]
    return plan["graphs"]


def test_explain_for_a_gpu_has_no_scores_in_memory(tmp_path):
    """On the CPU, where they are, they are 8 x 4096 x 4096 numbers."""
    live = {}
    for hardware in ("h200", "cpu"):
        graphs = graphs_of(tmp_path, f"{__file__}:latent", "--hardware", hardware)
        live[hardware] = max(graph["live_bytes"] for graph in graphs)
    assert live["h200"] < 2 * 8 * 4096 * 4096 < live["cpu"]


class FlexAttention(LatentAttention):
    def forward(self, x):
        parts = self.project(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        return flex_attention(*parts.chunk(3, -1))


def flex():
    model = FlexAttention(queries=64, values=64)
    return model, lambda step, rank: torch.randn(1, 1024, 64), lambda model, x: model(x).float().mean()


def test_flex_attention_is_explained_without_a_gpu(tmp_path, capsys):
    """torch refuses its backward on CPUs; what a GPU runs is known all the same."""
    assert [graph["kind"] for graph in graphs_of(tmp_path, f"{__file__}:flex")] == ["forward", "backward"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        graphs_of(tmp_path, f"{__file__}:flex", "--hardware", "cpu")
    assert "does not support backward on CPU" in capsys.readouterr().err


def test_a_triton_kernel_is_explained_without_a_gpu(tmp_path):
    """With what it writes, else its inputs would be copied, of which torch warns."""
    pytest.importorskip("triton")
    module = Path(__file__).parents[2] / "benchmarks/custom_kernels.py:triton_swiglu"
    with mock.patch.object(triton_kernel_wrap.log, "warning") as warn:  # torch's loggers do not reach caplog
        graphs = graphs_of(tmp_path, str(module))
    assert not any("every input is mutated" in str(call) for call in warn.call_args_list)
    assert [graph["kind"] for graph in graphs] == ["forward", "backward"]
