"""Each formula of `zcompile/costs/formulas` against arithmetic by hand; operations against torch's own counter."""

import functools
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import zcompile
from tests.support.decoder import SIZE
from zcompile.costs.formulas import lookup as formulas
from zcompile.costs.formulas import registry
from zcompile.costs.formulas.lookup import find_work
from zcompile.costs.formulas.work import Call, nbytes_of
from zcompile.costs.hardware import CPU, Hardware
from zcompile.costs.model import Costs, simulate
from zcompile.explanation.llama import Llama
from zcompile.options import Settings

aten = torch.ops.aten
bf16, fp32, int64, int8, fp8 = torch.bfloat16, torch.float32, torch.int64, torch.int8, torch.float8_e4m3fn

# A second is 1e12 operations of bf16, 0.5e12 of fp32, 2e12 of fp8 and int8, and 1e9 bytes; a kernel takes 1 us.
FLOPS_S = ((bf16, 1e12), (fp32, 0.5e12), (fp8, 2e12), (int8, 2e12))
MACHINE = replace(CPU, matmul_flops_s=FLOPS_S, attention_flops_s=1e12, bytes_s=1e9, kernel_s=1e-6)
MACHINE = replace(MACHINE, grouped_share=0.5, attention_varies=True)
TINY_BYTES = replace(MACHINE, bytes_s=1e30)  # so that operations decide
OPERATIONS = replace(TINY_BYTES, kernel_s=0.0)  # and nothing else
KERNEL_S = 1e-6
meta = lambda *shape, dtype=bf16: torch.empty(shape, dtype=dtype, device="meta")


def call(op, *args, out, hardware: Hardware = MACHINE, modules=None, **kwargs):
    """A graph with one call of `op`, and its costs. Tensors among `args` become inputs; strings name subgraphs."""
    owner = nn.Module()
    for name, module in (modules or {}).items():
        owner.add_module(name, module)
    graph = Graph(owner)
    values = {}

    def argument(value):
        if isinstance(value, torch.Tensor):
            if id(value) not in values:
                values[id(value)] = graph.placeholder(f"x{len(values)}")
                values[id(value)].meta["val"] = value
            return values[id(value)]
        if isinstance(value, tuple):
            return tuple(map(argument, value))
        if isinstance(value, dict):
            return {name: argument(each) for name, each in value.items()}
        return graph.get_attr(value) if isinstance(value, str) and value in (modules or {}) else value

    args = tuple(map(argument, args))
    node = graph.call_function(op, args, {name: argument(value) for name, value in kwargs.items()})
    node.meta["val"] = out
    graph.output((node,))
    costs = Costs(graph, hardware.over("gloo", 2))
    return costs.seconds[node], costs


def seconds(op, *args, **kwargs):
    return call(op, *args, **kwargs)[0]


def takes(expected_s, op, *args, **kwargs):
    assert seconds(op, *args, **kwargs) == pytest.approx(expected_s)


def test_int8_and_fp8_products_run_at_the_rate_of_what_they_read():
    product, out = 2 * 64 * 32 * 128, meta(64, 128, dtype=torch.int32)
    left, right, scale = meta(64, 32, dtype=int8), meta(32, 128, dtype=int8), meta(1, dtype=fp32)
    assert seconds(aten._int_mm.default, left, right, out=out, hardware=TINY_BYTES) == KERNEL_S > product / 2e12
    takes(product / 2e12, aten._int_mm.default, left, right, out=out, hardware=OPERATIONS)
    left, right = meta(64, 32, dtype=fp8), meta(32, 128, dtype=fp8)
    takes(product / 2e12, aten._scaled_mm.default, left, right, scale, scale, out=meta(64, 128), hardware=OPERATIONS)


def test_a_product_of_integers_without_tensor_cores_reads_both_factors_of_each_operation():
    left, right, out = meta(64, 32, dtype=int64), meta(32, 128, dtype=int64), meta(64, 128, dtype=int64)
    takes(2 * 64 * 32 * 128 * 8 / 1e9, aten.mm.default, left, right, out=out)


def test_a_dtype_without_a_rate_has_that_of_the_next_wider_one():
    bare = replace(MACHINE, matmul_flops_s=((fp32, 4.0),))
    assert bare.matmul_rate(fp8) == bare.matmul_rate(int8) == bare.matmul_rate(torch.float16) == 4.0
    assert bare.matmul_rate(torch.float64) == 2.0 and bare.matmul_rate(torch.complex128) == 0.5


@pytest.mark.parametrize("rows", [8, 4096])
def test_grouped_products_read_the_matrices_that_are_hit_and_compute_whole_tiles(rows):
    groups, k, n = 16, 64, 32
    hits = 16 * (1 - (15 / 16) ** rows)
    args = aten._grouped_mm.default, meta(rows, k), meta(groups, k, n), meta(groups, dtype=torch.int32)
    padded = {8: hits * 64, 4096: 4096 + 64 * hits}[rows]
    takes(2 * padded * k * n / 0.5e12, *args, out=meta(rows, n), hardware=OPERATIONS)
    takes((2 * rows * k + 2 * hits * k * n + 2 * rows * n) / 1e9, *args, out=meta(rows, n))


def test_gradients_of_grouped_matrices_pad_what_groups_divide():
    args = aten._grouped_mm.default, meta(64, 4096), meta(4096, 32), meta(16, dtype=torch.int32)
    takes(2 * 64 * (4096 + 16 * 64) * 32 / 0.5e12, *args, out=meta(16, 64, 32), hardware=OPERATIONS)


def test_a_loop_over_groups_starts_a_kernel_for_each_and_waits_for_the_device():
    name = "transformers::grouped_mm_fallback"
    left, right = zcompile.TensorSize((8, 64), fp32), zcompile.TensorSize((16, 64, 32), fp32)
    work = formulas.BUILT_IN[name](Call(name, (left, right), {}, zcompile.TensorSize((8, 32), fp32)))
    assert work.on(replace(TINY_BYTES, kernel_s=1e-6), fp32, 0) == pytest.approx(16e-6 + 20e-6)
    assert work.on(OPERATIONS, fp32, 0) == pytest.approx(2 * 8 * 64 * 32 / 0.5e12 + 20e-6)


def test_attention_with_a_mask_computes_everything_at_its_kernels_rate():
    q, mask = meta(2, 4, 1024, 64), meta(2, 4, 1024, 1024)
    flops = 2 * 2 * 2 * 4 * 1024 * 1024 * 64
    logs, seed = meta(2, 4, 1024, dtype=fp32), meta(dtype=int64)
    efficient = aten._scaled_dot_product_efficient_attention.default
    expected_s = flops / 0.48e12 / (1.18 * 0.8 * 0.5)  # forward, narrow heads, a mask
    takes(expected_s, efficient, q, q, q, mask, True, out=(q, logs, seed, seed), hardware=TINY_BYTES)
    flash, on_paper = (getattr(aten, f"_scaled_dot_product_flash_attention{of}").default for of in ("", "_for_cpu"))
    for op in (flash, on_paper):
        takes(flops / 2 / 1e12 / (1.18 * 0.8 * 0.8), op, q, q, q, 0.0, True, out=(q, logs), hardware=TINY_BYTES)
    cpu = replace(TINY_BYTES, attention_varies=False)
    # A CPU computes whole blocks of 512 keys: of 1024 rows, half see one block, and half see two.
    takes(0.75 * flops / 1e12, on_paper, q, q, q, 0.0, True, out=(q, logs), hardware=cpu)
    q, short = meta(2, 4, 256, 64), (meta(2, 4, 256, 64), meta(2, 4, 256, dtype=fp32))
    causal, full = (seconds(on_paper, q, q, q, 0.0, is_causal, out=short, hardware=cpu) for is_causal in (True, False))
    assert causal == full


def test_forward_and_backward_of_wide_heads_together_reach_the_rate_of_the_table():
    q, logs = meta(1, 2, 1024, 128), meta(1, 2, 1024, dtype=fp32)
    forward = aten._scaled_dot_product_cudnn_attention.default
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    given = seconds(forward, q, q, q, None, True, out=(q, logs), hardware=TINY_BYTES)
    given += seconds(backward, q, q, q, q, q, logs, out=(q, q, q), hardware=TINY_BYTES)
    assert given == pytest.approx((2 + 5) * 2 * 2 * 1024 * 1024 * 128 / 1.8e12, rel=5e-3)


class Causal(nn.Module):
    def forward(self, batch, head, row, column):
        return row >= column


class Documents(nn.Module):
    def forward(self, batch, head, row, column, documents):
        return documents[row] == documents[column]


@pytest.mark.parametrize("backward", [False, True])
def test_flex_attention_computes_the_blocks_that_its_mask_lets_through(backward):
    """Of 8 x 8 blocks a causal mask computes 36. A mask that reads tensors may compute all."""
    q = meta(1, 2, 1024, 64)
    counts, indices = meta(1, 1, 8, dtype=torch.int32), meta(1, 1, 8, 8, dtype=torch.int32)
    op = torch.ops.higher_order.flex_attention_backward if backward else torch.ops.higher_order.flex_attention
    logsumexp, documents = meta(1, 2, 1024, dtype=fp32), meta(1024, dtype=int64)
    full = (5 if backward else 2) * 2 * 2 * 1024 * 1024 * 64

    def given(mask, others=()):
        block_mask = (1024, 1024, counts, indices, None, None, counts, indices, None, None, 128, 128, mask)
        first = (q, q, q, q, logsumexp, q, None, None, None) if backward else (q, q, q, None)
        modules = {"causal": Causal(), "documents": Documents()}
        rest = (block_mask, 0.125, {}, (), others)
        return seconds(op, *first, *rest, out=(q, logsumexp), hardware=TINY_BYTES, modules=modules)

    share = (0.94 if backward else 1.18) * 0.8  # of narrow heads
    assert given("causal") == pytest.approx(full * 36 / 64 / 1.03e12 / (share * 0.8))
    assert given("documents", (documents,)) == pytest.approx(full / 1.03e12 / share)


def test_long_rows_of_a_softmax_are_read_twice():
    long, short = meta(64, 32_000, dtype=fp32), meta(2000, 1024, dtype=fp32)
    takes(3 * 64 * 128_000 / 1e9, aten._log_softmax.default, long, -1, False, out=long)
    takes(2 * 2000 * 4096 / 1e9, aten._softmax.default, short, -1, False, out=short)


def test_a_loss_reads_one_item_of_each_row():
    scores, targets, one = meta(4096, 32_000, dtype=fp32), meta(4096, dtype=int64), meta(dtype=fp32)
    expected_s = 4096 * (32 + 8) / 1e9 + 4096 * 1.2e-9
    takes(expected_s, aten.nll_loss_forward.default, scores, targets, None, 1, -100, out=(one, meta(dtype=fp32)))
    expected_s = (4096 * 32_000 * 4 + 4096 * 8) / 1e9 + KERNEL_S
    takes(expected_s, aten.nll_loss_backward.default, one, scores, targets, None, 1, -100, one, out=scores)


def test_gathers_read_what_they_return_and_not_their_whole_source():
    table, rows, out = meta(1_000_000, 64, dtype=fp32), meta(100, dtype=int64), meta(100, 64, dtype=fp32)
    read_s = (100 * 256 + 800 + 100 * 256) / 1e9
    takes(read_s + KERNEL_S, aten.index.Tensor, table, (rows,), out=out)
    takes(read_s, aten.index_select.default, table, 0, rows, out=out)
    takes(read_s + KERNEL_S, aten.embedding.default, table, rows, out=out)
    columns, out = meta(1_000_000, 1, dtype=int64), meta(1_000_000, 1, dtype=fp32)
    takes((32 + 8 + 4) * 1_000_000 / 1e9 + KERNEL_S, aten.gather.default, table, 1, columns, out=out)


@pytest.mark.parametrize("op, args", [(aten.empty_like.default, 1), (aten.empty.memory_format, 0)])
def test_memory_that_nobody_writes_takes_no_time(op, args):
    x = meta(1 << 20)
    assert seconds(op, *([x] if args else [[1 << 20]]), out=x) == 0.0


@torch.library.custom_op("zcompile_costs::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@pytest.fixture
def clean_registry():
    before = dict(registry._registered)
    formulas._told.clear()
    yield
    registry._registered.clear()
    registry._registered.update(before)


OP = torch.ops.zcompile_costs.product.default


def test_an_op_without_a_formula_counts_as_bytes_and_is_told_once(clean_registry, caplog):
    x = meta(64, 64, dtype=fp32)
    with caplog.at_level(logging.INFO, "zcompile"):
        given, costs = call(OP, x, x, out=x)
        call(OP, x, x, out=x)
    assert given == pytest.approx(2 * 64 * 64 * 4 / 1e9) and costs.without_formula == {"zcompile_costs::product": given}
    assert len([line for line in caplog.messages if "zcompile_costs::product" in line]) == 1


@pytest.mark.parametrize("op", [product, OP, torch.ops.zcompile_costs.product, "zcompile_costs::product"])
def test_a_registered_cost_counts_however_the_op_is_named(op, clean_registry):
    zcompile.register_cost(op, lambda a, b, *, out: zcompile.Work(flops=2 * out.numel * a.shape[-1]), version=1)
    x = meta(64, 64, dtype=fp32)
    given, costs = call(OP, x, x, out=x, hardware=OPERATIONS)
    assert given == pytest.approx(2 * 64**3 / 0.5e12) and not costs.without_formula


def test_a_registered_cost_replaces_a_built_in_one(clean_registry):
    zcompile.register_cost(torch.ops.aten.topk, lambda *args, out, **kwargs: zcompile.Work(seconds=7.0, nbytes=0), 1)
    x = meta(8, 8)
    takes(7.0 + KERNEL_S, aten.topk.default, x, 2, out=(x, x), hardware=TINY_BYTES)


@pytest.mark.parametrize("wrong", [lambda a, b, *, out: 3.0, lambda a: None])
def test_a_registered_cost_that_fails_warns_and_counts_as_bytes(wrong, clean_registry, caplog):
    zcompile.register_cost(OP, wrong, 1)
    x = meta(64, 64, dtype=fp32)
    given, costs = call(OP, x, x, out=x)
    assert given == pytest.approx(2 * 64 * 64 * 4 / 1e9) and list(costs.without_formula) == ["zcompile_costs::product"]
    assert any("zcompile_costs::product is not used" in line for line in caplog.messages)


def test_an_op_that_writes_to_its_arguments_has_its_own_formula(clean_registry):
    zcompile.register_cost("aten::add_", lambda *, self, other, out, **_: zcompile.Work(nbytes=other.nbytes), 1)
    x, y = meta(1 << 20), meta(1 << 10)
    op = torch.ops.higher_order.auto_functionalized_v2
    takes(2 * (1 << 10) / 1e9, op, aten.add_.Tensor, other=y, _self_base_index=0, _all_bases=(x,), out=(None, x))


class Kernel:
    """A Triton kernel as torch.compile keeps it: an autotuner around a compiled function around a Python function."""

    def __init__(self, fn):
        self.fn = fn


def test_a_triton_kernel_counts_its_tensors_or_what_was_registered(clean_registry):
    kernel, x, out = Kernel(Kernel(lambda x, out, n: None)), meta(4096), meta(4096)
    kwargs = {
        "kernel_idx": kernel_side_table.add_kernel(kernel),
        "constant_args_idx": kernel_side_table.add_constant_args({"n": 4096}),
        "grid": [(32, 1, 1)], "tma_descriptor_metadata": {},
        "kwargs": {"x": x, "out": out}, "tensors_to_clone": ["out"],
    }  # fmt: skip
    op = torch.ops.higher_order.triton_kernel_wrapper_functional
    given, costs = call(op, **kwargs, out={"out": out})
    assert given == pytest.approx(2 * 4096 * 2 / 1e9) and len(costs.without_formula) == 1
    work_of = lambda x, out, n, grid: zcompile.Work(flops=n * grid[0], dtype=x.dtype, nbytes=0)
    zcompile.register_cost(kernel, work_of, version="2")
    given, costs = call(op, **kwargs, out={"out": out}, hardware=OPERATIONS)
    assert given == pytest.approx(4096 * 32 / 1e12) and not costs.without_formula


@pytest.mark.parametrize(
    "arguments, says",
    [
        *(((op, zcompile.Work, 1), "is no op of torch's and no") for op in ("product", 3, nn.Linear, lambda x: x)),
        ((OP, 3, 1), "must be callable"),
        ((OP, zcompile.Work, None), "version must be"),
    ],
)
def test_what_is_no_op_no_function_or_no_version_cannot_be_registered(arguments, says):
    with pytest.raises(TypeError, match=says):
        zcompile.register_cost(*arguments)


def test_a_plan_names_the_costs_it_rests_on(clean_registry):
    link = CPU.over("gloo", 2)
    before = Settings().plan(link, 1 << 30)
    zcompile.register_cost(OP, lambda a, b, *, out: zcompile.Work(), version=1)
    first = Settings().plan(link, 1 << 30)
    zcompile.register_cost(OP, lambda a, b, *, out: zcompile.Work(), version=2)
    second = Settings().plan(link, 1 << 30)
    assert len({str(before), str(first), str(second)}) == 3 and ("zcompile_costs::product", "2") in second.costs


def arguments_for(name, size):
    """Arguments and a result of the op `name`, whose sizes grow with `size`."""
    rows, square = zcompile.TensorSize((size, 64), fp32), zcompile.TensorSize((size, size), fp32)
    index, heads = zcompile.TensorSize((size,), int64), zcompile.TensorSize((2, 4, size, 64), bf16)
    matrices = zcompile.TensorSize((8, 64, 32), fp32)
    if "attention" in name:
        return (heads,) * (4 if "backward" in name else 3), (heads,)
    if "grouped" in name:
        return (rows, matrices, index), zcompile.TensorSize((size, 32), fp32)
    if name.startswith(("aten::_int_mm", "aten::_scaled_mm")):
        return (square, square), square
    if "nll_loss" in name:
        return (square, index, index), square
    return (square, 0, index), (square, index)


def test_larger_calls_take_no_less_time():
    """Each built-in formula but those of flex attention, at sizes that double."""
    for name in sorted(name for name in formulas.BUILT_IN if "flex" not in name):
        times = []
        for size in (64, 128, 256, 512, 1024):
            args, out = arguments_for(name, size)
            work = formulas.BUILT_IN[name](Call(name, args, {}, out))
            times.append(work.on(MACHINE, fp32, nbytes_of(args) + nbytes_of(out)))
        assert times == sorted(times) and (times[0] < times[-1] or "empty" in name), name


def test_users_collectives_take_the_wire_and_not_memory():
    """Each against the link's own times; the wait for one is exposed, compute beside it is not."""
    c10d, link = torch.ops._c10d_functional, MACHINE.over("gloo", 2)
    small, large = meta(1 << 20, dtype=fp32), meta(2 << 20, dtype=fp32)
    for op, args, out, wire_s in (
        (c10d.all_gather_into_tensor.default, (small, 2, "0"), large, link.gather_s(8 << 20)),
        (c10d.reduce_scatter_tensor.default, (large, "sum", 2, "0"), small, link.reduce_s(8 << 20)),
        (c10d.all_reduce.default, (small, "sum", "0"), small, link.reduce_s(4 << 20) + link.gather_s(4 << 20)),
        (c10d.all_to_all_single.default, (small, [1, 1], [1, 1], "0"), small, link.gather_s(4 << 20)),
    ):
        graph = Graph()
        x = graph.placeholder("x")
        x.meta["val"] = args[0]
        started = graph.call_function(op, (x, *args[1:]))
        sine = graph.call_function(aten.sin.default, (x,))
        waited = graph.call_function(c10d.wait_tensor.default, (started,))
        started.meta["val"] = waited.meta["val"] = out
        sine.meta["val"] = args[0]
        graph.output((waited, sine))
        costs = Costs(graph, link)
        assert costs.seconds[started] == costs.seconds[waited] == 0.0 < costs.seconds[sine]
        assert simulate(graph, costs).exposed_s == pytest.approx(max(0.0, wire_s - costs.seconds[sine]))


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
        out, rest = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
        given = torch.ones_like(out), query, key, value, out, rest, 0.0, causal
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given)

    forward, backward = counted(plain)
    scores = forward // 2
    for causal, share in ((False, 1), (True, 2)):
        graph = make_fx(functools.partial(step, causal=causal), tracing_mode="fake")(query, key, value).graph
        ours = [find_work(node)[0].flops for node in graph.nodes if "scaled_dot_product" in str(node.target)]
        assert ours == [forward // share, (backward + scores) // share]
