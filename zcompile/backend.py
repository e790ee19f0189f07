"""`backend="zcompile"`: AOTAutograd, zcompile's passes, and Inductor. The only file that knows Inductor."""

import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.lowering import fallback_handler
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule

from zcompile.analysis.fx_utils import (
    GATHER,
    GATHER_CACHED_START,
    GATHER_GROUP_START,
    GATHER_ROWS,
    GATHER_STARTS,
    GATHER_WAIT,
    REDUCE_GROUP_START,
    REDUCE_STARTS,
    REDUCE_WAIT,
    SAVED_FOR_BACKWARD,
    calls,
)
from zcompile.analysis.hardware import CPU
from zcompile.options import Plan, Settings
from zcompile.passes import pipeline
from zcompile.passes.verify import verify_partition
from zcompile.sharding.model_state import ShardedModel, model_of

LOWERED = (*GATHER_STARTS, GATHER_WAIT, GATHER_ROWS, *REDUCE_STARTS, REDUCE_WAIT)


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; what `torch.compile(model, backend="zcompile")` calls.

    Args:
        mode: an Inductor mode, such as "max-autotune-no-cudagraphs".
        options: see `zcompile.options.Settings`.

    Raises:
        ValueError: an unknown option.
        RuntimeError: the model writes to a sharded parameter in forward.
    """
    settings = Settings.parse(options)
    _refuse_writes(gm)
    _warn_if_unsharded(gm)
    plan = _plan(example_inputs, settings)
    for model in _models(example_inputs):
        model.limit_microbatch_cache(settings.microbatch_cache_bytes)
    if settings.inner == "aot_eager":
        compiled = compile_aot_eager(gm, example_inputs, plan)
    else:
        compiled = _compile_inductor(gm, example_inputs, plan, settings.inductor, mode)
    if settings.transport == "auto" and not any(model.agreement for model in _models(example_inputs)):
        return compiled
    return _at_first(compiled, settings.transport, _told(gm, example_inputs, plan, settings.microbatch_cache_bytes))


def _models(inputs: Sequence[Any]) -> list[ShardedModel]:
    """The models that some of `inputs` are shards of."""
    return list({id(model): model for one in inputs if (model := model_of(one)) is not None}.values())


def _plan(example_inputs: Sequence[Any], settings: Settings) -> Plan:
    """What the passes are configured with, for the model that the inputs are shards of; the same on all its ranks."""
    model = next(iter(_models(example_inputs)), None)
    if model is None:  # nothing is gathered, or tests compile a graph of their own
        link, free_bytes = CPU.over("gloo", 2), CPU.memory_bytes
    else:
        transport = model.transport.transport if settings.transport == "auto" else settings.transport
        link, free_bytes = model.hardware.over(transport, model.runtime.world), model.free_bytes
    return settings.plan(link, free_bytes)


def _at_first(compiled: Callable[..., Any], transport: str, told: Sequence[str]) -> Callable[..., Any]:
    """`compiled`, which when it is first called puts its model on `transport`, and compares with other ranks what they run."""
    done = False

    def run(*args: Any) -> Any:
        nonlocal done
        if not done:
            for model in _models(args):
                if transport != "auto":
                    model.use_transport(transport)
                if model.agreement is not None:
                    model.agreement.check(told)
            done = True
        return compiled(*args)

    return run


def _told(gm: GraphModule, example_inputs: Sequence[Any], plan: Plan, microbatch_cache_bytes: int | None) -> list[str]:
    """A line for each thing that must be the same on all ranks: what decides which parameters travel, in which order and groups."""
    names = {id(sharded.leaf): name for model in _models(example_inputs) for name, sharded in model.parameters.items()}
    origin = dict(zip(gm.graph.find_nodes(op="placeholder"), map(id, example_inputs), strict=True))
    lines = []
    for node in calls(gm.graph, GATHER):
        shard, shape, dtype = node.args
        where = " ".join(map(str.strip, (node.meta.get("stack_trace") or "").strip().splitlines()[-2:]))
        lines.append(f"reads '{names.get(origin.get(shard), '?')}' {list(shape)} {dtype} ({where})")
    return [
        *lines,
        f"plans under {plan}",
        f"keeps {microbatch_cache_bytes} bytes over micro-steps",
        f"has torch {torch.__version__} and zcompile {_sources()[:12]}",
    ]


def _refuse_writes(gm: GraphModule) -> None:
    """A gathered parameter is a copy: a write to it would be lost. Dynamo's fake tensors count writes through any view."""
    for node in calls(gm.graph, GATHER):
        if node.meta["example_value"]._version > 0:
            raise RuntimeError(
                f"zcompile: forward modifies parameter {node.args[0].name} in place, at\n{node.meta.get('stack_trace', '')}\n"
                "It is a gathered copy, so the change would be lost. Compute a new tensor instead, or update the DTensor in "
                "model.parameters() outside of forward."
            )


def _warn_if_unsharded(gm: GraphModule) -> None:
    if not (dist.is_initialized() and dist.get_world_size() > 1) or calls(gm.graph, GATHER):
        return
    placeholders = gm.graph.find_nodes(op="placeholder")
    if any(isinstance(node.meta.get("example_value"), torch.nn.Parameter) for node in placeholders):
        warnings.warn(
            "zcompile: this graph reads parameters that are not sharded, so every rank keeps all of them and gradients are "
            "not reduced. Call zcompile.shard(model) before compiling. It is compiled as Inductor would.",
            stacklevel=2,
        )


def compile_aot_eager(
    gm: GraphModule, example_inputs: Sequence[Any], plan: Plan, look: Callable[[Graph], None] = lambda graph: None
) -> Callable[..., Any]:
    """Plan one Dynamo graph and run it op by op; `look` is called with each graph before it is scheduled."""
    before, after = pipeline.joint(plan), pipeline.schedule(plan)

    def partition(joint: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any):
        pipeline.run(joint.graph, before)
        return _partition(plan, joint, joint_inputs, **kwargs)

    def schedule(graph_module: GraphModule, _: Sequence[Any], joint: bool):
        if joint:
            pipeline.run(graph_module.graph, before)
        look(graph_module.graph)
        pipeline.run(graph_module.graph, after)
        graph_module.recompile()
        return make_boxed_func(graph_module.forward)

    compile_aot = aot_autograd(
        fw_compiler=functools.partial(schedule, joint=False),
        bw_compiler=functools.partial(schedule, joint=False),
        inference_compiler=functools.partial(schedule, joint=True),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return compile_aot(gm, example_inputs)


def _compile_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], plan: Plan, inductor: Mapping[str, Any], mode: str | None
) -> Callable[..., Any]:
    patches = {
        **(list_mode_options(mode) if mode else {}),
        "joint_custom_pre_pass": _Passes(pipeline.joint(plan), plan),
        "custom_partitioner_fn": _Partitioner(plan),
        "post_grad_custom_post_pass": _Schedule(pipeline.schedule(plan), plan),
        "reorder_for_peak_memory": False,  # it would undo the prefetch: it knows nothing of transfers
        "shape_padding": False,  # it measures, so that ranks get different graphs and gather and reduce in different orders
        **inductor,
    }
    return compile_fx(gm, list(example_inputs), config_patches=patches)


def _partition(plan: Plan, joint: GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **kwargs: Any):
    save_more = config.ban_recompute_materialized_backward and not plan.rematerialize
    with config.patch(ban_recompute_materialized_backward=save_more):
        forward, backward = min_cut_rematerialization_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
        )
    verify_partition(forward, num_fwd_outputs)
    return forward, backward


@functools.cache
def _sources() -> str:
    """A hash of everything that decides what the passes do; Inductor's caches are keyed by it."""
    root = Path(__file__).parent
    files = {path.resolve() for folder in (root, root / "passes") for path in folder.rglob("*.py")}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


class _Passes(CustomGraphPass):
    def __init__(self, which: Sequence[pipeline.Pass], plan: Plan):
        self.which = which
        self.plan = plan

    def __call__(self, graph: Graph) -> None:
        pipeline.run(graph, self.which)

    def uuid(self) -> str:
        names = [pipeline.name_of(one) for one in self.which]
        return f"{names} {self.plan} {_sources()}"


class _Schedule(_Passes):
    """The last thing that happens to the graph before it is lowered."""

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        for start in calls(graph, GATHER_GROUP_START, REDUCE_GROUP_START):
            for item in start.users:
                item.target = _item
        for node in calls(graph, *LOWERED):
            node.target = _lowering_of(node.target)
        placeholders = graph.find_nodes(op="placeholder")
        for saved in placeholders:
            if saved.meta.get(SAVED_FOR_BACKWARD):
                with graph.inserting_after(placeholders[-1]):
                    graph.call_function(_never_reuse, (saved,)).meta["val"] = saved.meta["val"]


class _Partitioner(CustomPartitionerFn):
    def __init__(self, plan: Plan):
        self.plan = plan

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any):
        return _partition(self.plan, gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return f"{self.plan} {_sources()}"


@functools.cache
def _lowering_of(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A target that is its own lowering. It keeps zcompile's ops in FX order: Inductor would order them by data dependence alone.

    Of such a target Inductor does not infer the fake value again, which would give it another storage, and then those of nearly
    all that comes behind it.
    """
    lower = _lower_cached if op is GATHER_CACHED_START else _lower
    fallback = fallback_handler(op, add_to_fallback_set=False)

    def lowered(*args: Any) -> Any:
        return lower(fallback, *args)

    lowered.__name__ = lowered.__qualname__ = op.name().replace("::", "_").replace(".", "_")
    lowered._inductor_lowering_function = True
    return lowered


def _lower_cached(fallback: Callable[..., Any], *args: Any) -> Any:
    """Have Inductor free what is gathered after its last reader, and never give its memory to another result: it is the runtime's.

    So it does with memory that is an alias of something. Here that is the call itself, whose other results nobody reads.
    """
    result = _lower(fallback, *args)
    output = result.data.data
    name = output.inputs[0].get_name()
    output.get_inputs_that_alias_output = lambda: [name]
    return result


def _item(results: Sequence[Any], at: int) -> Any:
    """operator.getitem, but Inductor does not infer the item's fake value again."""
    return results[at]


_item._inductor_lowering_function = True


def _never_reuse(saved: Any) -> Any:
    """Have Inductor leave alone a full parameter that was saved for backward, though it may write over other things that were."""
    V.graph.never_reuse_buffers.add(saved.get_name())
    return saved


_never_reuse._inductor_lowering_function = True


def _lower(fallback: Callable[..., Any], *args: Any) -> Any:
    graph = V.graph
    before = len(graph.operations)
    result = fallback(*args)
    made = graph.operations[before:]
    for operation in made:  # the runtime checks shapes and aligns; in Python that is 2 us per parameter and step
        operation.codegen_size_asserts = lambda wrapper: None
        operation.codegen_alignment_asserts = lambda wrapper: None
    previous = getattr(graph, "zcompile_previous", None)
    if previous is not None:
        for operation in made:
            graph.additional_buffer_deps[operation.get_operation_name()].add(previous)
    graph.zcompile_previous = made[-1].get_name()
    return result
