"""`zcompile.shard`: from an unsharded model to one shard of each parameter per rank, in seven phases.

| phase | file | job | other ranks |
|---|---|---|---|
| validate | validate.py | the first reason why this rank's model cannot be sharded | |
| plan | plan.py | where each parameter goes, and which modules are units | |
| agree | agree.py | every rank has the same plan, and all plan with one machine | one exchange |
| connect | connect.py | process groups and runtimes | together |
| build | build.py | the parameters become DTensors, module by module | |
| install | install.py | modules read them, and units have an order | |
| start | start.py | equal values of scalars and replicas, a transport | together |

A phase is given what the phases before it returned, and calls none of them.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile.ranks.process_groups import default_mesh
from zcompile.ranks.shared_errors import raised_on_all_ranks
from zcompile.sharding.agree import agree
from zcompile.sharding.build import build
from zcompile.sharding.connect import connect
from zcompile.sharding.install import install
from zcompile.sharding.plan import ShardOptions, plan_shards
from zcompile.sharding.precision import MixedPrecision
from zcompile.sharding.start import start
from zcompile.sharding.validate import validate
from zcompile.state.placement import PlacementFunction
from zcompile.units.find import UnitLike


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = True,
    ignored_params: Iterable[nn.Parameter] = (),
    units: Iterable[UnitLike] | Mapping[UnitLike, MixedPrecision] | None = None,
    native_reduce: bool = False,
    shard_placement_fn: PlacementFunction | None = None,
    gradient_divide_factor: float | None = None,
    states: str | None = None,
    gather_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard every parameter of `model` over the ranks, in place (ZeRO-3, arXiv:1910.02054).

    Afterwards each rank holds rows [r * ceil(n / W), (r + 1) * ceil(n / W)) of every parameter with n rows as a
    DTensor with placement `Shard(0)`, as FSDP2 does; scalars stay unsharded (`Replicate()`), and so do buffers.
    Modules gather a parameter when they read it, and its gradient is reduced to the mean over ranks. Works in eager;
    `torch.compile` with `backend="zcompile"` plans it. Each rank keeps its slice of its own initial values, as FSDP2
    does: seed all ranks alike to start from one model.

    Args:
        model: any module, on the mesh's device, on CPU (moved piece by piece) or on the meta device (each module is
            made by its `reset_parameters()`; the unsharded model never exists on one rank).
        mesh: 1-D (shard), or 2-D (replicate x shard). Default: all ranks of the default process group.
        param_dtype: dtype on the wire and in compute; main parameters keep theirs. Frozen parameters of other dtypes
            (integers, bool, float8) travel and are read as they are. Floating-point inputs of `model`, of modules that
            repeat in it (children of its outermost lists and sequences) and of units are cast to it. Default: that of
            the main parameters, which `torch.autocast` narrows.
        reduce_dtype: a narrower dtype for gradients on the wire. The sum is fp32 in any case (fp64 for fp64), in rank
            order.
        output_dtype: to which floating-point results of `model` are cast. Default: they stay as they are.
        cast_forward_inputs: whether inputs are cast to `param_dtype`.
        ignored_params: parameters that stay as they are: whole on each rank, and their gradients are not reduced. So
            are those of parameters and modules that are added after `shard`. The first backward that reaches one warns.
        units: modules, or classes of modules, whose forward reads other parameters on each rank, as a loop over the
            experts that tokens hit does. When the forward of one begins, all parameters of it and of the modules below
            it are gathered together, whatever of them it reads; backward gathers them again, and reduces all gradients
            together. Compiled code ends before a unit and begins again inside of it and behind it. A unit inside of
            another is a part of that. Every step moves every unit, also one that no rank calls. Default: modules that
            loop over experts, as far as that can be seen (README.md); an empty list for none. Or a mapping of modules
            or classes to a `zcompile.MixedPrecision`, FSDP2's `MixedPrecisionPolicy`: the dtypes of their parameters,
            inputs and outputs in place of the four arguments above. They hold for the modules inside, too. Units are
            then those of the default.
        native_reduce: reduce by the reduce-scatter of NCCL (or gloo) where the transport is one of them. It adds up
            in its own order, in the dtype of the wire, so numbers depend on the backend, the number of ranks and
            their links. bf16 gradients are added up in bf16, unless `reduce_dtype`, which may then be the wider one,
            makes them travel as fp32. fp16 sums may overflow. Scalars, sums over replicas, division and accumulation
            stay as they are; peer to peer, everything does.
        shard_placement_fn: parameter -> where it is sharded: None for rows over `mesh`, a `Shard` for another
            dimension, or a `zcompile.Placement`, which has a mesh of its own, such as experts need under expert
            parallelism. FSDP2's `ShardPlacementResult` is taken, too.
        gradient_divide_factor: what the sum of gradients over ranks is divided by; 1.0 leaves the sum. Default: the
            number of ranks of `mesh`, for parameters over other meshes, too. So a loss that is a mean over the tokens
            of a rank has gradients that are means over all ranks.
        states: "global" on a 2-D mesh (host x gpu) shards main parameters, their gradients and the optimizer's states
            over all ranks, while forward and backward gather inside of a host alone, from a copy in `param_dtype`. Once
            a step, each rank gets its part of the copy from the other hosts. DTensors have the placements
            `(Shard(0), Shard(0))` over the transposed mesh (gpu x host). Default: they are where the parameters are
            gathered from, so that each replica has all of them (HSDP).
        gather_dtype: `torch.int8` quantizes gathers of all floating-point parameters with two dimensions or more, as
            ZeRO++ does: blocks of 256 elements travel as int8 with a float32 scale, and arrive in `param_dtype`. This
            halves the bytes of bf16 gathers. Blocks and units gather so, in eager, also under `model.compile()`, whose
            graphs end there; gradients are as ever. Default: `param_dtype`.

    Returns:
        `model`, with parameters replaced. Build the optimizer afterwards.

    Raises:
        RuntimeError: no process group, sharded already, an optimizer that holds its parameters exists, or ranks
            disagree on the model, or a DTensor over a mesh that overlaps `mesh`.
        ValueError: a mesh that is neither 1-D nor 2-D, mixed devices, or `units` that the model does not have. A
            `gather_dtype` that is not int8, or with `states`, or with a matrix sharded along its second dimension. With
            `states="global"`: a mesh that is not 2-D, or a parameter that is a DTensor already, a tensor subclass, or
            placed over another mesh or along another dimension than the first.
        TypeError: a tensor subclass without FSDP2's all-gather hooks, a parameter that trains in another dtype than
            float16, bfloat16, float32 or float64, an option's dtype that is not floating-point, `units` that are no
            modules.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "zcompile.shard needs a process group: call torch.distributed.init_process_group() first "
            "(under torchrun, or with one rank)."
        )
    mesh = default_mesh(model) if mesh is None else mesh
    options = ShardOptions(
        MixedPrecision(param_dtype, reduce_dtype, output_dtype, cast_forward_inputs),
        dict(units) if isinstance(units, Mapping) else {},
        frozenset(id(parameter) for parameter in ignored_params),
        None if units is None or isinstance(units, Mapping) else tuple(units),
        native_reduce,
        shard_placement_fn,
        gradient_divide_factor,
        states,
        gather_dtype,
    )
    placements, error = validate(model, mesh, options)
    plan = plan_shards(model, mesh, options, placements) if error is None else None
    machine = agree(mesh, error, plan.description if plan is not None else ())
    assert plan is not None  # `agree` has raised the error
    state = connect(plan, machine)
    with raised_on_all_ranks(mesh) as progress:
        build(model, plan, state, progress)
        install(model, plan, state)
    start(state)
    return model
