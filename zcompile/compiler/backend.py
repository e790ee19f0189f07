"""The torch.compile backend "zcompile": options, AOTAutograd and zcompile's passes; inductor.py compiles the result."""

import functools
import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import RestartAnalysis
from torch._functorch import config
from torch.autograd.graph import get_gradient_edge
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _BoxedCodeGen

from zcompile.compiler.graph_checks import check_graph
from zcompile.compiler.inductor import Partition, check_config, compile_inductor, wants_cuda_graphs
from zcompile.compiler.memory_limit import Agree, within_limit
from zcompile.costs.hardware import CPU, Link
from zcompile.costs.memory import transport_bytes
from zcompile.graph.liveness import mark_saved
from zcompile.graph.ops import DOMAINS_OF_MODEL, GATHER, calls, domain_of, user_collective_of
from zcompile.options import MemoryLimit, Plan, Settings
from zcompile.passes import pipeline
from zcompile.passes.tag_recompute import save_readers_of_written, save_stateful
from zcompile.passes.verify import verify_partition
from zcompile.ranks.program_check import Agreement, Line
from zcompile.source_hash import source_hash
from zcompile.state.attributes import PARAMETER, PLANS, UNIT
from zcompile.state.forward_scope import checking_requires_grad
from zcompile.state.microbatches import Deferred
from zcompile.state.sharded_model import ShardedModel, models_of
from zcompile.state.sharded_parameter import ShardedParameter, as_parameter, model_of
from zcompile.state.user_hooks import hooks_for_others, saves_by_hooks

LEAST_BUDGET = 1e-6  # at 0.0, torch's partitioner ignores tags such as MUST_SAVE, and saves only inputs of the graph


def parse_options(options: Mapping[str, Any] | None) -> Settings:
    """Check a user's options, including those for Inductor, and return them as settings.

    Raises ValueError, with a list of the known options, if an option is unknown or has an invalid value.
    """
    settings = Settings.parse(options)
    check_config(settings.inductor)
    return settings


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph. `torch.compile(model, backend="zcompile")` calls it.

    Args:
        example_inputs: inputs of the graph. Parameters among them are leaves: plain tensors over this rank's shards.
        mode: an Inductor mode, such as "reduce-overhead", which asks for CUDA graphs.
        options: see `zcompile.options.Settings`.

    Raises:
        ValueError: an option is unknown, or options contradict each other.
        RuntimeError: the graph uses a parameter in an unsupported way (`check_graph`), or no plan fits `memory_limit`.
    """
    settings = parse_options(options)
    if wants_cuda_graphs(settings.inductor, mode):
        settings = parse_options({**vars(settings), "cuda_graphs": True})
    plan = _plan(example_inputs, settings)
    if settings.save_for_backward_bytes is None and saves_by_hooks():
        plan = replace(plan, save_for_backward_bytes=0)  # such hooks (save_on_cpu) would copy unsharded parameters
    _tell_models_apart(gm, example_inputs)
    program = functools.partial(_program, _reads(gm), plan, settings)
    try:
        compiled = compile_planned(
            gm, example_inputs, settings, plan, mode, agree=_agreeing(example_inputs, settings, plan, program)
        )
    except Exception as error:
        if not isinstance(error, RestartAnalysis):  # Dynamo catches it and traces again: not a failure
            _stop_others(example_inputs, settings, error)
        raise
    if not _models(example_inputs):
        return compiled
    compiled = _passing_for_parameters(gm, compiled) if calls(gm.graph, GATHER) else _refusing_split_backwards(compiled)
    return _on_first_run(checking_requires_grad(compiled), settings, program)


setattr(compile_graph, PLANS, True)


def _tell_models_apart(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Give models in a graph different domain numbers, because no bucket (of one domain) may mix two models."""
    numbers: dict[ShardedModel, int] = {}
    for model in _models(example_inputs):
        first = next((other for other in numbers if model in other.others), model)
        numbers[model] = numbers.setdefault(first, len(set(numbers.values())))
    inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs))
    for node in gm.graph.find_nodes(op="call_function", target=GATHER) if len(numbers) > 1 else ():
        owner = model_of(inputs.get(node.args[0]))
        if owner is not None and numbers[owner] > 0:
            node.args = (*node.args[:3], domain_of(node) + DOMAINS_OF_MODEL * numbers[owner])


def _agreement_of(model: ShardedModel, settings: Settings) -> Agreement | None:
    """Return the `Agreement` by which ranks compare programs; None with p2p, where unequal programs do not hang."""
    return model.program_check if link_of(model, settings).wire.transport != "p2p" else None


def _stop_others(example_inputs: Sequence[Any], settings: Settings, error: Exception) -> None:
    """Make other ranks raise `error`; otherwise they would wait for the graph that this rank failed to compile."""
    for model in _models(example_inputs):
        if (agreement := _agreement_of(model, settings)) is not None:
            agreement.stop(f"could not compile a graph: {type(error).__name__}: {error}")


def _agreeing(
    example_inputs: Sequence[Any], settings: Settings, plan: Plan, program: Callable[[Sequence[Any]], list[Line]]
) -> Agree | None:
    """Return the argument `agree` for `within_limit`, by which ranks choose one plan; None if they need not agree.

    Without a memory limit, plans do not depend on a rank's inputs. With p2p, ranks with different plans do not hang.
    The returned function must not hold inputs, because it lives as long as the compiled code.
    """
    agreement = next((_agreement_of(model, settings) for model in _models(example_inputs)), None)
    if agreement is None or plan.memory_limit is None:
        return None
    lines = program(example_inputs)
    return lambda name, number: agreement.largest([*lines, Line(f"has a number of {name}")], number)


def partition(
    plan: Plan, joint: GraphModule, joint_inputs: Sequence[Any], agree: Agree | None = None, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph into forward and backward, with the plan that `within_limit` chooses for the memory limit."""
    plan = within_limit(plan, joint, lambda plan, joint: _split(plan, joint, joint_inputs, **kwargs), agree)
    return _split(plan, joint, joint_inputs, **kwargs)


def compile_planned(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    plan: Plan,
    mode: str | None,
    split: Partition = partition,
    agree: Agree | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph with the passes that `plan` configures. Inductor's result has a method `serialize`.

    Args:
        split: splits a joint graph into forward and backward.
        agree: `agree(name, number)` returns the largest number that a rank passes, so that all ranks choose the same
            plan; see `within_limit`. Given on all ranks, or on none.

    Raises:
        ValueError, RuntimeError: see `compile_graph`.
    """
    check_graph(gm, example_inputs)
    _warn_if_unsharded(gm, example_inputs)
    if settings.inner == "aot_eager":
        return compile_aot_eager(gm, example_inputs, plan, agree=agree)
    split = functools.partial(split, agree=agree) if agree else split
    agrees = agree is not None
    return compile_inductor(gm, example_inputs, plan, split, settings.inductor, mode, settings.cuda_graphs, agrees)


def compile_aot_eager(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    plan: Plan,
    look: Callable[[Graph, Plan], None] = lambda graph, plan: None,
    agree: Agree | None = None,
    simplify: bool = False,
) -> Callable[..., Any]:
    """Run the passes of `plan` on one Dynamo graph, and return a callable that runs it op by op, without Inductor.

    Args:
        look: called with each forward or backward graph and its plan, before the schedule passes run on the graph.
        agree: see `compile_planned`.
        simplify: whether Inductor decomposes ops and simplifies graphs first, as before it compiles them.
    """
    joint_passes, schedule_passes = pipeline.joint_passes(plan), pipeline.schedule_passes(plan)
    chosen = plan

    def split(
        plan: Plan, joint: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        nonlocal chosen
        chosen = within_limit(plan, joint, lambda plan, joint: _split(plan, joint, joint_inputs, **kwargs), agree)
        return _split(chosen, joint, joint_inputs, **kwargs)

    def schedule(graph_module: GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        look(graph_module.graph, chosen)
        pipeline.run_passes(graph_module.graph, schedule_passes)
        graph_module.graph.set_codegen(_BoxedCodeGen())  # else all inputs, such as activations, live until the end
        graph_module.recompile()
        return graph_module

    def split_joint(joint: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        pipeline.run_passes(joint.graph, joint_passes)
        return split(plan, joint, joint_inputs, **kwargs)

    def schedule_joint(graph_module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        pipeline.run_passes(graph_module.graph, joint_passes)
        return schedule(graph_module)

    if simplify:
        return compile_inductor(gm, example_inputs, plan, split, {}, None, inner_compile=schedule)
    compile_aot = aot_autograd(
        fw_compiler=schedule,
        bw_compiler=schedule,
        inference_compiler=schedule_joint,
        partition_fn=split_joint,
        keep_inference_input_mutations=True,
    )
    return compile_aot(gm, example_inputs)


def _split(
    plan: Plan, joint: GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph by torch's min-cut partitioner, and verify which tensors forward saves for backward."""
    save_more = config.ban_recompute_materialized_backward and not plan.rematerialize
    save_readers_of_written(joint.graph)
    budget = plan.activation_memory_budget
    if (budget < 1.0 or plan.recomputed[0]) and save_stateful(joint.graph):
        budget = max(budget, LEAST_BUDGET)
    with config.patch(ban_recompute_materialized_backward=save_more, activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
        )
    verify_partition(forward, num_fwd_outputs)
    mark_saved(forward, backward, num_fwd_outputs)
    return forward, backward


def _passing_for_parameters(gm: GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `compiled`: mark gathered parameters among its results as nn.Parameter, for eager code that uses them."""
    results = cast(Sequence[Any], gm.graph.output_node().args[0])
    positions = [i for i, node in enumerate(results) if isinstance(node, Node) and node.target is GATHER]
    if not positions:
        return compiled

    def run(*args: Any) -> Any:
        values = compiled(*args)
        for position in positions:
            as_parameter(values[position])
        return values

    return run


def _refusing_split_backwards(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap code of a one-rank model, which has no reduces: raise in a split backward (of inputs alone), as they do."""

    def run(*args: Any) -> Any:
        values = compiled(*args)
        models = [(arg, model) for arg in args if (model := model_of(arg)) is not None]
        leaves = [leaf for leaf, model in models if leaf.requires_grad and model.microbatches.accumulates]

        def refuse(_: Any) -> None:
            executes = torch._C._will_engine_execute_node
            if _keeps_graph() and not any(executes(get_gradient_edge(leaf).node) for leaf in leaves):
                raise RuntimeError(
                    "zcompile: a split backward (of inputs alone, retain_graph=True) came to parameter "
                    f"'{getattr(leaves[0], PARAMETER).name}' on rank {dist.get_rank()} inside of zcompile.accumulate. "
                    "Compiled code computes no gradients of parameters alone: run a zero-bubble pipeline in eager."
                )

        nodes = {value.grad_fn for value in values if isinstance(value, torch.Tensor)} if leaves else set()
        for node in filter(None, nodes):
            node.register_prehook(refuse)
        return values

    return run


def _models(inputs: Sequence[Any]) -> list[ShardedModel]:
    """Return the models whose shards are among `inputs`, ordered by domain."""
    found = {id(model): model for value in inputs if (model := model_of(value)) is not None}
    return sorted(found.values(), key=lambda model: model.domain)


def _plan(example_inputs: Sequence[Any], settings: Settings) -> Plan:
    """Return the plan of the first model whose shards are among the inputs. It is equal on all ranks of the model."""
    model = next(iter(_models(example_inputs)), None)
    if model is None:  # no parameter is sharded, or a test compiles a graph of its own
        link, memory_bytes = CPU.over("gloo", 2), CPU.memory_bytes
    else:
        link, memory_bytes = link_of(model, settings), model.machine.memory_bytes
    return limited(settings, settings.plan(link, memory_bytes), example_inputs)


def limited(settings: Settings, plan: Plan, example_inputs: Sequence[Any]) -> Plan:
    """Return `plan` with the option `memory_limit`, for a Dynamo graph with the inputs `example_inputs`."""
    # Inputs may be unsharded parameters of a unit: eager code gathers the parameters of small layers compiled alone.
    units = {i: unit for i, each in enumerate(example_inputs) if (unit := getattr(each, UNIT, lambda: None)())}
    first = next(iter(_models(example_inputs)), None) or next((unit.state for unit in units.values()), None)
    if settings.memory_limit is None or first is None:
        return plan
    shards = {i for i, value in enumerate(example_inputs) if model_of(value) is not None}
    known = [
        (each, -(-math.prod(each.shape) // model.runtime.world))
        for model in models_of(first)
        for each in model.in_modules()
    ]
    elements = {id(each.leaf): count for each, count in known}
    total = sum(elements.values())
    read = sum(elements.get(id(example_inputs[i]), 0) for i in shards)
    read += sum(-(-example_inputs[i].numel() // first.runtime.world) for i in units)
    share = min(1.0, read / max(total, 1))
    nbytes = sum(_kept_bytes(each, count) for each, count in known)
    nbytes += transport_bytes(total, plan.link, max(elements.values(), default=0))
    inputs = tuple(sorted(shards | units.keys()))
    return replace(plan, memory_limit=MemoryLimit(int(settings.memory_limit), nbytes, share, inputs))


def _kept_bytes(sharded: ShardedParameter, count: int) -> int:
    """Return this rank's bytes of a shard of `count` elements, Adam's moments and, if accumulated, the gradient."""
    state, itemsize = sharded.state, sharded.leaf.itemsize
    own = -(-count // state.mesh.size(0)) if state.over_hosts else count
    nbytes = own * itemsize + (count * (sharded.layout.dtype or sharded.leaf.dtype).itemsize if state.over_hosts else 0)
    if sharded.on_host is not None:
        nbytes = count * sharded.on_host.narrow.itemsize
    if not sharded.parameter.requires_grad:
        return nbytes
    if not state.offloads:
        nbytes += 2 * own * itemsize
    if state.microbatches.accumulates:
        nbytes += count * itemsize * (state.runtime.world if state.microbatches.deferred is Deferred.REDUCES else 1)
    return nbytes


def link_of(model: ShardedModel, settings: Settings) -> Link:
    """Return the rates of compute and transfers from which passes plan for `model`; they are equal on all its ranks."""
    transport = model.transport.transport if settings.transport == "auto" else settings.transport
    return model.machine.hardware.over(transport, model.runtime.world)


def prepare(model: ShardedModel, settings: Settings) -> None:
    """Apply transport, microbatch cache and CUDA graphs of `settings` to a model. All ranks call this together."""
    if settings.transport != "auto":
        model.use_transport(settings.transport)
    model.limit_microbatch_cache(settings.microbatch_cache_bytes)
    if settings.cuda_graphs:
        _prepare_for_graphs(model)


def _prepare_for_graphs(model: ShardedModel) -> None:
    """Prepare a model's transfers for capture in CUDA graphs. Raises ValueError if they use NCCL's collectives."""
    has_collectives = model.runtime.world > 1 and "p2p" not in model.runtime.stats()["transport"]
    # Code that uses NCCL in another domain, such as that of experts, runs uncaptured, and stats(model) says why.
    if model.mesh.device_type == "cuda" and has_collectives and model.domain == 0:
        raise ValueError(
            "zcompile: CUDA graphs (option 'cuda_graphs', modes 'reduce-overhead' and 'max-autotune') cannot hold the "
            f"collectives of NCCL, which this model uses ({model.transport.reason}): dist.destroy_process_group() "
            "would hang. Use the option transport='p2p' if the GPUs are in one host, or mode 'default' or "
            "'max-autotune-no-cudagraphs'."
        )
    model.runtime.prepare_for_graphs()


def _on_first_run(
    compiled: Callable[..., Any], settings: Settings, program: Callable[[Sequence[Any]], list[Line]]
) -> Callable[..., Any]:
    """Wrap `compiled`: its first run with each model prepares the model, and compares `program` with other ranks.

    Models of one class with equal options share `compiled`, because Dynamo compiles their code once.
    """
    prepared: weakref.WeakSet[ShardedModel] = weakref.WeakSet()
    position: int | None = None  # of an input that is a leaf

    def run(*args: Any) -> Any:
        nonlocal position
        model = None if position is None else model_of(args[position])
        if model is None or model not in prepared:
            position = next((i for i, value in enumerate(args) if model_of(value) is not None), None)
            for model in _models(args):
                prepare(model, settings)
                model.provenance.compiled = model.provenance.compiled or "compiled by this process"
                if model.agreement is not None:
                    model.agreement.check(program(args))
                prepared.add(model)
        if not saves_by_hooks():
            return compiled(*args)
        with hooks_for_others({each.untyped_storage()._cdata for each in args if model_of(each) is not None}):
            return compiled(*args)

    return run


class _Read(NamedTuple):
    """A gather in a Dynamo graph, or a collective that the model calls itself."""

    position: int | None  # index of the graph input that is gathered, -1 if it is no input; None for a collective
    what: str  # the dtype of the gather, or the name of the collective (without sizes, which may differ between ranks)
    place: str  # the line of the model's code that reads the parameter or calls the collective


def _reads(gm: GraphModule) -> list[_Read]:
    """Return the gathers of a Dynamo graph and the collectives that the model calls itself, in the graph's order."""
    positions = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    reads = []
    for node in gm.graph.nodes:
        collective = user_collective_of(node)
        if node.target is not GATHER and not collective:
            continue
        place = " ".join(map(_without_folder, (node.meta.get("stack_trace") or "").strip().splitlines()[-2:]))
        if collective:
            reads.append(_Read(None, collective, place))
        else:
            shard, _, dtype = cast(tuple[Node, list[int], torch.dtype], node.args[:3])
            reads.append(_Read(positions.get(shard, -1), str(dtype), place))
    return reads


def _without_folder(line: str) -> str:
    """Shorten the path in a line of a stack trace to the part below `sys.path`: folders differ between hosts."""
    quoted = line.strip().split('"')
    if len(quoted) < 3:
        return line.strip()
    folders = [folder for folder in sys.path if folder and quoted[1].startswith(os.path.join(folder, ""))]
    quoted[1] = os.path.relpath(quoted[1], max(folders, key=len)) if folders else os.path.basename(quoted[1])
    return '"'.join(quoted)


def _program(reads: Sequence[_Read], plan: Plan, settings: Settings, args: Sequence[Any]) -> list[Line]:
    """Return the lines that ranks compare: all that decides the order and the buckets of transfers."""
    known = {id(sharded.leaf): sharded for model in _models(args) for sharded in model.in_modules()}

    def line(read: _Read) -> Line:
        if read.position is None:
            return Line(f"calls {read.what}", read.place)
        sharded = known.get(id(args[read.position])) if read.position >= 0 else None
        if sharded is None:
            return Line(f"reads '?' {read.what}", read.place)
        return Line(f"reads '{sharded.name}' {list(sharded.global_shape)} {read.what}", read.place)

    return [
        *map(line, reads),
        Line(f"has costs of {dict(plan.costs) or 'no ops'} by zcompile.register_cost"),
        Line(f"plans under {plan}"),
        Line(f"caches {settings.microbatch_cache_bytes} bytes across microbatches"),
        Line(f"has torch {torch.__version__} and zcompile {source_hash()[:12]}"),
    ]


def _warn_if_unsharded(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    if not (dist.is_initialized() and dist.get_world_size() > 1) or calls(gm.graph, GATHER):
        return
    unsharded = [value for value in example_inputs if model_of(value) is None]  # a model on one rank has no gathers
    # Parameters that an earlier graph or a unit gathered do not count.
    if any(type(value) is torch.nn.Parameter and not hasattr(value, UNIT) for value in unsharded):
        warnings.warn(
            "zcompile: this graph reads parameters that are not sharded, so every rank keeps all of them and gradients "
            "are not reduced. Call zcompile.shard(model) before compiling. This graph is compiled as by Inductor.",
            stacklevel=2,
        )
