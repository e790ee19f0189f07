"""Which attention a graph has that is traced on the CPU for a GPU."""

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
from zcompile.costs.hardware import H100
from zcompile.explanation.without_gpu import DeviceAttention

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
    scores_bytes = 2 * 8 * 4096 * 4096
    assert live["h200"] < scores_bytes < live["cpu"]


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
