"""`zcompile.shard`: from an unsharded model to one shard of each parameter per rank, in seven phases.

| phase | file | effect | communication |
|---|---|---|---|
| validate | validate.py | gets the placement of each parameter, and finds the first error | |
| plan | plan.py | decides which modules are units, and in which dtypes parameters are gathered | |
| agree | agree.py | checks that all ranks have the same plan; all get the same hardware rates | one exchange |
| connect | connect.py | makes process groups and runtimes | collective |
| build | build.py | replaces parameters by DTensors, module by module | |
| install | install.py | makes units and blocks, and lets modules gather the parameters that they read | |
| start | start.py | broadcasts scalars, and parameters to replicas; chooses a transport | collective |

Each phase calls no other phase.
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

    Afterwards rank r of W holds rows [r * ceil(n / W), (r + 1) * ceil(n / W)) of every parameter with n rows as a
    DTensor with placement `Shard(0)`, as FSDP2 does; scalars stay unsharded (`Replicate()`), and so do buffers.
    Modules gather a parameter when they read it, and its gradient is reduced to the mean over ranks. This works in
    eager code; in code compiled with `backend="zcompile"`, compiler passes decide when gathers and reduces start. Each
    rank keeps its slice of its own initial values, as under FSDP2: seed all ranks alike to start from one model.

    Args:
        model: any module, on the mesh's device, on CPU (shards are moved to the device) or on the meta device (each
            module is initialised by its `reset_parameters()`; no rank ever holds the unsharded model).
        mesh: 1-D (shard), or 2-D (replicate x shard). Default: all ranks of the default process group.
        param_dtype: dtype of gathers and of compute; main parameters (the DTensors) keep their own dtype. So do frozen
            integer, bool and float8 parameters. Floating-point inputs are cast to `param_dtype` at `model`, at its
            repeated layers (children of its outermost lists and sequences) and at units. Default: the dtype of the main
            parameters; compiled code under `torch.autocast` may gather in the dtype of autocast.
        reduce_dtype: a narrower dtype in which gradients are sent. Ranks still add them up in fp32 (fp64 ones in fp64),
            in rank order. Default: the dtype of the gradients.
        output_dtype: dtype to which floating-point results of `model` are cast. Default: no cast.
        cast_forward_inputs: whether inputs are cast to `param_dtype`.
        ignored_params: parameters that stay whole on each rank, and whose gradients are not reduced. Parameters and
            modules added after `shard` are treated in the same way. The first backward that reaches one of these warns.
        units: modules, or classes of modules, whose forward may read different parameters on each rank, such as a loop
            over the experts that tokens hit. When the forward of a unit begins, the parameters of the module and of its
            submodules are gathered together; backward gathers them again, and reduces all gradients together. A unit
            breaks the graph. A unit inside of another belongs to the outer one. Each step gathers and reduces every
            unit, also one that no rank calls. Default: modules that are recognised as loops over experts. An empty
            list: no units. A mapping from modules or classes to `zcompile.MixedPrecision` (FSDP2's
            `MixedPrecisionPolicy`): the default units, and dtypes for these modules and their submodules in place of
            `param_dtype`, `reduce_dtype`, `output_dtype` and `cast_forward_inputs`.
        native_reduce: reduce gradients by the reduce-scatter of NCCL (or gloo), if that is the transport. It sums in
            its own order and in the dtype on the wire, so results depend on the backend, the number of ranks and their
            links. fp16 sums may overflow. bf16 gradients are summed in bf16; with this option, `reduce_dtype` may be
            wider, such as fp32. The option does not change scalars, sums over replicas, division and accumulation. It
            has no effect with the transport "p2p".
        shard_placement_fn: function of a parameter that returns its placement. None: rows over `mesh`. A `Shard`:
            another dimension. A `zcompile.Placement`: a mesh of its own, as for experts under expert parallelism.
            FSDP2's `ShardPlacementResult` is accepted, too.
        gradient_divide_factor: the number by which sums of gradients over ranks are divided; 1.0: no division. Default:
            the number of ranks of `mesh`, also for parameters over other meshes. So if each rank's loss is a mean over
            its tokens, gradients are means over all ranks.
        states: "global" on a 2-D mesh (host x gpu) shards main parameters, their gradients and the optimizer's states
            over all ranks. Each host has a copy of all parameters in `param_dtype`, sharded over its GPUs. Forward and
            backward gather from this copy; once a step, each rank updates its shard of the copy from the other hosts.
            DTensors have the placements `(Shard(0), Shard(0))` over the transposed mesh (gpu x host). Default: states
            are sharded over the second dimension of the mesh alone, so each replica has all of them (HSDP).
        gather_dtype: `torch.int8` quantizes gathers of all floating-point parameters with two dimensions or more, as
            ZeRO++ does: every 256 elements are sent as int8 with one float32 scale, and arrive in `param_dtype`. This
            halves the bytes of bf16 gathers. Such parameters are gathered by eager code at a layer's or unit's call,
            where the graphs of `model.compile()` break. Reduces are not quantized. Default: `param_dtype`.

    Returns:
        `model`, with parameters replaced. Build the optimizer afterwards.

    Raises:
        RuntimeError: there is no process group; the model is sharded already; an optimizer holds its parameters; ranks
            disagree on the model; or a parameter is a DTensor over a mesh that overlaps `mesh`.
        ValueError: a mesh is neither 1-D nor 2-D; parameters are on several devices; the model does not have `units`;
            `gather_dtype` is not int8, or is used with `states` or with a matrix not sharded along its first dimension.
            With `states="global"`: the mesh is not 2-D, or a parameter is a DTensor already, a tensor subclass, or
            placed over another mesh or along another dimension than the first.
        TypeError: a parameter is a tensor subclass without FSDP2's all-gather hooks, or trains in another dtype than
            float16, bfloat16, float32 or float64; an option's dtype is not floating-point; or `units` are no modules.
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
