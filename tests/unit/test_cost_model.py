"""Operations that the cost model counts, against torch's own counter."""

import functools

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from tests.support.decoder import SIZE
from zcompile.costs.formulas.lookup import find_work
from zcompile.explanation.llama import Llama


def test_operations_of_products_are_torchs(traced):
    """Against torch's counter on the model in one piece, without attention, which some versions count on the CPU."""
    model = Llama(SIZE)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 25, dtype=torch.int64)).backward()
    nodes = [node for captured in traced for node in captured.graph.nodes if node.op == "call_function"]
    products = [node for node in nodes if "scaled_dot_product" not in str(node.target)]
    counts = counter.get_flop_counts()["Global"]
    counted = sum(count for op, count in counts.items() if "scaled_dot_product" not in str(op))
    works = [find_work(node)[0] for node in products]
    assert sum(work.flops for work in works if work is not None) == counted > 0
    assert len(nodes) - len(products) >= 2 * SIZE.layers


def test_operations_of_attention_are_those_of_its_products():
    """Queries are grouped. Flash attention's backward forms the scores once more than the plain one."""
    query, key, value = torch.randn(2, 6, 10, 8), torch.randn(2, 3, 12, 8), torch.randn(2, 3, 12, 8)

    def plain(query, key, value):
        key, value = (heads.repeat_interleave(2, 1) for heads in (key, value))
        return torch.softmax(query @ key.transpose(-1, -2), -1) @ value

    def counted(function):
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        with FlopCounterMode(display=False) as forward:
            out = function(*inputs)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()

    def step(query, key, value, causal):
        out, rest = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
        grad = torch.ones_like(out)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, rest, 0.0, causal
        )

    forward, backward = counted(plain)
    scores = forward // 2
    for causal, share in ((False, 1), (True, 2)):
        graph = make_fx(functools.partial(step, causal=causal), tracing_mode="fake")(query, key, value).graph
        ours = [find_work(node)[0].flops for node in graph.nodes if "scaled_dot_product" in str(node.target)]
        assert ours == [forward // share, (backward + scores) // share]
