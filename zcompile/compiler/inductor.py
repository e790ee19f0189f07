"""Compiles graphs with zcompile's passes and Inductor."""

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._functorch import config as torch_config
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule, Node

from zcompile.compiler.cuda_graphs import CapturedCode, Pair
from zcompile.graph.ops import (
    GATHER_CACHED_START,
    GATHER_GROUP_START,
    GATHER_ROWS,
    GATHER_START,
    GATHER_STARTS,
    GATHER_WAIT,
    REDUCE_GROUP_START,
    REDUCE_STARTS,
    REDUCE_WAIT,
    SAVED_FOR_BACKWARD,
    calls,
    is_user_collective,
    shards_of,
)
from zcompile.options import Plan
from zcompile.passes import pipeline
from zcompile.source_hash import cache_key

LOWERED = (*GATHER_STARTS, GATHER_WAIT, GATHER_ROWS, *REDUCE_STARTS, REDUCE_WAIT)

Partition = Callable[..., tuple[GraphModule, GraphModule]]  # see `zcompile.compiler.backend.partition`


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown Inductor setting, or one by which ranks would compile different graphs."""
    if strange := [name for name in config if not hasattr(inductor_config, name)]:
        raise ValueError(
            f"zcompile: option 'inductor' has {', '.join(map(repr, strange))}, which Inductor does not know; "
            "torch._inductor.list_options() lists its settings."
        )
    if config.get("shape_padding") and not config.get("force_shape_pad"):
        raise ValueError(
            "zcompile: Inductor's 'shape_padding' decides by timing kernels, and times differ between ranks; set "
            "'force_shape_pad' as well, to pad on all ranks."
        )


def wants_cuda_graphs(config: Mapping[str, Any], mode: str | None) -> bool:
    """Return whether a mode, an option or torch's own configuration asks for CUDA graphs."""
    settings = {**(list_mode_options(mode) if mode else {}), **config}
    return bool(settings.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def compile_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    plan: Plan,
    partition: Partition,
    config: Mapping[str, Any],
    mode: str | None,
    cuda_graphs: bool = False,
    agrees: bool = False,
    inner_compile: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Run the passes that `plan` configures on one Dynamo graph, and compile it with Inductor.

    Args:
        partition: splits a joint graph into forward and backward, see `zcompile.compiler.backend.partition`.
        config: Inductor's settings for this graph, which override those of `mode` and of zcompile.
        mode: an Inductor mode, such as "max-autotune-no-cudagraphs".
        cuda_graphs: whether to capture forward and backward; see `zcompile.compiler.cuda_graphs`.
        agrees: whether `partition` waits for all ranks. Then no cache is used, because cached code skips `partition`.
        inner_compile: compiles a forward or backward graph, by default Inductor's `compile_fx_inner`.
    """
    patches = {
        **(list_mode_options(mode) if mode else {}),
        "joint_custom_pre_pass": _Passes(pipeline.joint_passes(plan), plan),
        "custom_partitioner_fn": _Partitioner(partition, plan),
        "post_grad_custom_post_pass": _Schedule(pipeline.schedule_passes(plan), plan),
        "reorder_for_peak_memory": False,  # would undo `prefetch`: it does not consider transfers
        "benchmark_harness": False,  # would write shard sizes, which differ between ranks, into the code
        "shape_padding": False,  # times kernels, so ranks would get different graphs and orders of collectives
        # Inductor keeps memory of dead results, to reuse it for later results of the same size, while its estimate of
        # the peak allows it. The estimate counts shards as freed, so peaks were higher, and steps no faster.
        "allow_buffer_reuse": False,
        **config,
        "triton.cudagraphs": False,  # Inductor's own graphs cannot capture our transfers
    }
    inner_compile = _captures(Pair()) if cuda_graphs else inner_compile
    # Code from torch's caches skips `inner_compile` and `partition`.
    no_cache = torch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)
    with no_cache if inner_compile or agrees else contextlib.nullcontext():
        compiled: Any = compile_fx(gm, list(example_inputs), inner_compile or compile_fx_inner, patches)
    return compiled


def _captures(pair: Pair) -> Callable[..., Any]:
    """Return Inductor's compile function with `CapturedCode` around the compiled code."""

    def inner_compile(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not pair.obstacle and (obstacle := _obstacle_to_capture(gm)):
            pair.obstacle = obstacle
            warnings.warn(f"zcompile: no CUDA graph of this code: {obstacle}. The code runs uncaptured.", stacklevel=2)
        compiled: Any = compile_fx_inner(gm, example_inputs, **kwargs)
        mutated = list(compiled.mutated_input_idxs)
        compiled.current_callable = CapturedCode(
            compiled.current_callable, pair, mutated, bool(kwargs.get("is_backward"))
        )
        return compiled

    return inner_compile


def _obstacle_to_capture(gm: GraphModule) -> str:
    """Return why a graph cannot be captured in a CUDA graph; empty if it can."""
    collective = next(filter(is_user_collective, gm.graph.nodes), None)
    if collective is not None and dist.get_world_size() > 1:
        return f"{collective.name} is a collective, and NCCL cannot destroy a communicator while a graph has one"
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cuda":
            return f"tensor {node.name} is on {value.device.type}"
    unsafe = get_first_incompatible_cudagraph_node(gm)
    return f"op {unsafe.name} needs the host" if unsafe is not None else ""


class _Passes(CustomGraphPass):
    """Runs several of zcompile's passes as one pass of Inductor."""

    def __init__(self, passes: Sequence[pipeline.Pass], plan: Plan):
        self.passes = passes
        self.plan = plan

    def __call__(self, graph: Graph) -> None:
        pipeline.run_passes(graph, self.passes)

    def uuid(self) -> str:
        names = [pipeline.pass_name(each) for each in self.passes]
        return f"{names} {self.plan} {cache_key()}"


class _Schedule(_Passes):
    """Runs the schedule passes last before Inductor lowers a graph, and sets the lowerings of zcompile's ops."""

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        for start in calls(graph, GATHER_GROUP_START, REDUCE_GROUP_START):
            lower = _gathered_item if start.target is GATHER_GROUP_START else operator.getitem
            for item in start.users:
                item.target = _is_lowering(lower, item)  # else Inductor would infer its fake value again
        shards = _shards_of(graph)
        if shards:  # a subgraph, such as a mask of flex attention, has none
            _leave_alone(graph, shards)
            _call_at_begin(graph, _assert_no_sizes, *shards)
        for node in calls(graph, *LOWERED):
            node.target = _is_lowering(_lowering_of(cast(torch._ops.OpOverload, node.target)), node)
        for node in filter(is_user_collective, graph.nodes):
            node.target = _is_lowering(_in_fx_order(lowerings[node.target]), node)
        for saved in graph.find_nodes(op="placeholder"):
            if SAVED_FOR_BACKWARD in saved.meta:
                _call_at_begin(graph, _never_reuse, saved)


class _Partitioner(CustomPartitionerFn):
    def __init__(self, partition: Partition, plan: Plan):
        self.partition = partition
        self.plan = plan

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        return self.partition(self.plan, gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return f"{self.plan} {cache_key()}"

    def __getstate__(self) -> str:
        """Return text that torch hashes into keys of its caches."""
        return self.uuid()

    def __deepcopy__(self, memo: Any) -> "_Partitioner":
        return self  # called when torch copies its configuration


def _shards_of(graph: Graph) -> list[Node]:
    starts = calls(graph, *GATHER_STARTS, GATHER_ROWS, *REDUCE_STARTS)
    found = {shard for start in starts for shard in shards_of(start)}
    return [node for node in graph.find_nodes(op="placeholder") if node in found]


def _call_at_begin(graph: Graph, lower: Callable[..., Any], *inputs: Node) -> None:
    """Add a node by which Inductor calls `lower(*inputs)`, which returns the first input, before it lowers any op."""
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        node = graph.call_function(lower, inputs)
    node.meta["val"] = inputs[0].meta["val"]
    node.target = _is_lowering(lower, node)


def _leave_alone(graph: Graph, shards: Sequence[Node]) -> None:
    """Mark shards that forward saves for backward as visible to the user, so that Inductor returns them unchanged.

    Why: the runtime finds a parameter by its shard's memory. Inductor's layout optimization would save a channels-last
    copy of a shard that a convolution reads.
    """
    output = graph.output_node()
    saved = [i for i, node in enumerate(cast(Sequence[Any], output.args[0])) if node in shards]
    output.meta["user_visible_output_idxs"] = sorted({*output.meta.get("user_visible_output_idxs", ()), *saved})


def _is_lowering(lower: Callable[..., Any], node: Node) -> Callable[..., Any]:
    """Return a function that calls `lower`, to be the target of `node` alone. Inductor takes it as the node's lowering.

    To update fake values after a pass, Inductor (from torch 2.14 on) calls the target's metadata function. Ours returns
    the value that the node has. For a value of new storage, Inductor would infer all later nodes again, needlessly.
    """

    @functools.wraps(lower)
    def lowering(*args: Any, **kwargs: Any) -> Any:
        return lower(*args, **kwargs)

    lowering._inductor_lowering_function = True  # type: ignore[attr-defined]
    metadata_of = lambda *args, **kwargs: node.meta["val"]
    lowering._inductor_lowering_output_metadata_fn = metadata_of  # type: ignore[attr-defined]
    return lowering


def _in_fx_order(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `lower`: Inductor keeps ops of all wrapped lowerings in graph order, and may reorder others by data flow."""

    @functools.wraps(lower)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        before = len(graph.operations)
        result = lower(*args, **kwargs)
        operations = graph.operations[before:]
        previous = getattr(graph, "zcompile_previous", None)
        if previous is not None:
            for operation in operations:
                graph.additional_buffer_deps[operation.get_operation_name()].add(previous)
        graph.zcompile_previous = operations[-1].get_name()
        return result

    return lowered


@functools.cache
def _lowering_of(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return a lowering of one of zcompile's ops to a call of the op."""
    fallback = fallback_handler(op, add_to_fallback_set=False)

    def lower(*args: Any) -> Any:
        graph: Any = V.graph
        before = len(graph.operations)
        result = fallback(*args)
        for operation in graph.operations[before:]:  # the runtime checks both; in Python, checks take 2 us a parameter
            operation.codegen_size_asserts = lambda wrapper: None
            operation.codegen_alignment_asserts = lambda wrapper: None
        return _freed_but_never_reused(result) if op in (GATHER_START, GATHER_CACHED_START) else result

    lower.__name__ = lower.__qualname__ = op.name().replace("::", "_").replace(".", "_")
    return _in_fx_order(lower)


def _gathered_item(tensors: Any, i: int) -> Any:
    """Lower `getitem` of the result of a group's gather."""
    return _freed_but_never_reused(tensors[i])


def _freed_but_never_reused(gathered: Any) -> Any:
    """Let Inductor free a gathered buffer after its last reader, and never reuse its memory for another result.

    Why: the memory may belong to zcompile's transport. Or a custom op reads it on another stream, and calls
    `record_stream`, which stops torch's allocator from reusing the memory, but not Inductor. Inductor frees but never
    reuses a buffer that aliases another. So we declare that the gathered buffer aliases itself.
    """
    output = gathered.data.data
    output.get_inputs_that_alias_output = lambda: [output.get_name()]
    return gathered


def _never_reuse(saved: Any) -> Any:
    """Stop Inductor from reusing the memory of a parameter that forward saved; see `_freed_but_never_reused`."""
    graph: Any = V.graph
    graph.never_reuse_buffers.add(saved.get_name())
    return saved


def _assert_no_sizes(*shards: Any) -> Any:
    """Stop Inductor from writing assertions of shard sizes, so that all ranks can run the same code."""
    graph: Any = V.graph
    names = {shard.get_name() for shard in shards}
    make_wrapper = graph.init_wrapper_code

    def init_wrapper_code(*args: Any, **kwargs: Any) -> None:
        inputs = graph.graph_inputs
        graph.graph_inputs = {name: value for name, value in inputs.items() if name not in names}
        try:
            make_wrapper(*args, **kwargs)  # writes assertions for `graph_inputs`
        finally:
            graph.graph_inputs = inputs

    graph.init_wrapper_code = init_wrapper_code
    return shards[0]
