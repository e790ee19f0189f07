"""`zcompile.shard`: from an unsharded model to one shard of each parameter per rank, in seven phases.

| phase | file | effect | communication |
|---|---|---|---|
| validate | validate.py | finds the first error of this rank's model and arguments | |
| plan | plan.py | decides the placement of each parameter, and which modules are units | |
| agree | agree.py | checks that all ranks have the same plan; all get the same machine | one exchange |
| connect | connect.py | makes process groups and runtimes | collective |
| build | build.py | replaces parameters by DTensors, module by module | |
| install | install.py | lets modules gather the parameters that they read, and orders units | |
| start | start.py | makes scalars and replicas equal, and chooses a transport | collective |

Each phase takes the results of the phases before it, and calls no other phase.
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
    Modules gather a parameter when they read it, and its gradient is reduced to the mean over ranks. This works in
    eager; `torch.compile` with `backend="zcompile"` plans when it happens. Each rank keeps its slice of its own initial
    values, as under FSDP2: seed all ranks alike to start from one model.

    Args:
        model: any module, on the mesh's device, on CPU (shards are moved to the device) or on the meta device (each
            module is initialised by its `reset_parameters()`; no rank ever holds the unsharded model).
        mesh: 1-D (shard), or 2-D (replicate x shard). Default: all ranks of the default process group.
        param_dtype: dtype of gathers and of compute; main parameters keep theirs. Frozen parameters of other dtypes
            (integers, bool, float8) are gathered and read in their own. Floating-point inputs of `model`, of modules
            that repeat in it (children of its outermost lists and sequences) and of units are cast to it. Default: the
            dtype of the main parameters, which `torch.autocast` narrows.
        reduce_dtype: a narrower dtype for gradients on the wire. They are summed in fp32 (fp64 for fp64) all the same,
            in rank order.
        output_dtype: dtype to which floating-point results of `model` are cast. Default: no cast.
        cast_forward_inputs: whether inputs are cast to `param_dtype`.
        ignored_params: parameters that stay whole on each rank, and whose gradients are not reduced. The same holds for
            parameters and modules that are added after `shard`. The first backward that reaches one of them warns.
        units: modules, or classes of modules, whose forward may read different parameters on each rank, such as a loop
            over the experts that tokens hit. When the forward of a unit begins, all parameters of it and of the modules
            below it are gathered together; backward gathers them again, and reduces all gradients together. A unit
            breaks the graph. A unit inside of another belongs to the outer one. Each step gathers and reduces every
            unit, also one that no rank calls. Default: modules that are recognised as loops over experts;
            an empty list for none. Or a mapping of modules or classes to a `zcompile.MixedPrecision` (FSDP2's
            `MixedPrecisionPolicy`): the dtypes of their parameters, inputs and outputs, and of those of modules inside,
            in place of the four arguments above. Units are then the default ones.
        native_reduce: use the reduce-scatter of NCCL (or gloo) if that is the transport. It sums in its own order and
            in the dtype on the wire, so results depend on the backend, the number of ranks and their links. bf16
            gradients are summed in bf16, unless `reduce_dtype`, which may be wider in this case, makes them fp32. fp16
            sums may overflow. Scalars, sums over replicas, division and accumulation do not change; peer to peer,
            nothing does.
        shard_placement_fn: parameter -> its placement: None for rows over `mesh`, a `Shard` for another dimension, or a
            `zcompile.Placement` with a mesh of its own, such as experts need under expert parallelism. FSDP2's
            `ShardPlacementResult` is accepted, too.
        gradient_divide_factor: the number that sums of gradients over ranks are divided by; 1.0 keeps the sum. Default:
            the number of ranks of `mesh`, also for parameters over other meshes. So if each rank's loss is a mean over
            its tokens, gradients are means over all ranks.
        states: "global" on a 2-D mesh (host x gpu) shards main parameters, their gradients and the optimizer's states
            over all ranks. Forward and backward gather inside of a host alone, from a copy in `param_dtype`; once a
            step, each rank receives its part of the copy from the other hosts. DTensors have the placements
            `(Shard(0), Shard(0))` over the transposed mesh (gpu x host). Default: states are sharded over the second
            dimension of the mesh alone, so that each replica has all of them (HSDP).
        gather_dtype: `torch.int8` quantizes gathers of all floating-point parameters with two dimensions or more, as
            ZeRO++ does: 256 elements at a time are sent as int8 with a float32 scale, and arrive in `param_dtype`. This
            halves the bytes of bf16 gathers. Eager blocks and units gather them, also under `model.compile()`, whose
            graphs break there. Gradients do not change. Default: `param_dtype`.

    Returns:
        `model`, with parameters replaced. Build the optimizer afterwards.

    Raises:
        RuntimeError: there is no process group; the model is sharded already; an optimizer holds its parameters; ranks
            disagree on the model; or a parameter is a DTensor over a mesh that overlaps `mesh`.
        ValueError: a mesh is neither 1-D nor 2-D; parameters are on several devices; the model does not have `units`;
            `gather_dtype` is not int8, or is used with `states` or with a matrix sharded along its second dimension.
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
