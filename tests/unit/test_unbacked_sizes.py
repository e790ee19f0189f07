"""What plans take sizes for that no input decides, against sizes by hand."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from zcompile.costs.hardware import H200
from zcompile.costs.model import Costs
from zcompile.graph.ops import aten, calls, shape_hint, value

TOKENS, EXPERTS, TOP_K, WIDTH = 64, 4, 2, 32


def planned_graph(function, *inputs):
    """The graph of `function` with unbacked sizes, after its costs were computed."""
    graphs = []

    def keep(gm, example_inputs):
        Costs(gm.graph, H200.over("p2p", 2))
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(settings):
        torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*inputs)
    return graphs[0]


def tokens_by_comparison(chosen):
    return [torch.where(chosen == i)[0] for i in range(EXPERTS)]


def tokens_by_one_hot(chosen):
    mask = torch.nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    return [torch.where(mask[i])[1] for i in range(EXPERTS)]


@pytest.mark.parametrize("tokens_of", [tokens_by_comparison, tokens_by_one_hot])
def test_tokens_of_an_expert_are_an_equal_part_of_all_that_were_routed(tokens_of):
    def experts(x, router, weights):
        _, chosen = torch.topk(x @ router, TOP_K)
        out = torch.zeros_like(x)
        for token, weight in zip(tokens_of(chosen), weights):
            out = out.index_add(0, token, x[token] @ weight)
        return out

    inputs = torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, EXPERTS), torch.randn(EXPERTS, WIDTH, WIDTH)
    graph = planned_graph(experts, *inputs)
    products = [node for node in calls(graph, aten.mm.default) if value(node).shape[1] == WIDTH]
    assert [tuple(shape_hint(value(node))) for node in products] == [(TOKENS * TOP_K // EXPERTS, WIDTH)] * EXPERTS


def test_parts_of_a_split_are_equal():
    def parts(x, counts):
        first, second = (int(count) for count in counts.tolist())
        torch._check(first >= 0)
        torch._check(second >= 0)
        return [part * 2 for part in x.split([first, second])]

    graph = planned_graph(parts, torch.randn(TOKENS, WIDTH), torch.tensor([10, TOKENS - 10]))
    (split,) = calls(graph, aten.split_with_sizes.default)
    assert [tuple(shape_hint(part)) for part in split.meta["val"]] == [(TOKENS // 2, WIDTH)] * 2


def test_what_nothing_is_known_of_is_as_large_as_it_can_be():
    graph = planned_graph(lambda x: torch.nonzero(x > 0) + 1, torch.randn(TOKENS, WIDTH))
    (found,) = calls(graph, aten.nonzero.default)
    assert tuple(shape_hint(value(found))) == (TOKENS * WIDTH, 2)
