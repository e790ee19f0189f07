"""Makes the process groups and C++ runtimes of a model, before its parameters are sharded."""

import functools

from zcompile.calibration.machine import Machine
from zcompile.sharding.plan import ShardPlan
from zcompile.state.placement import mesh_over_hosts
from zcompile.state.sharded_model import ShardedModel


def connect(plan: ShardPlan, machine: Machine) -> ShardedModel:
    """Make the ShardedModels of all domains, and that of the units, without parameters. A collective call."""
    options, scale = plan.options, plan.mesh.size() / plan.divisor
    make = functools.partial(
        ShardedModel,
        machine=machine,
        native_reduce=options.native_reduce,
        inner_mean_scale=scale,
        mesh_of_states=mesh_over_hosts(plan.mesh) if options.over_hosts else None,
    )
    state = make(plan.mesh, divisor=options.gradient_divide_factor)
    state.provenance.shard_options = plan.options_text
    if plan.units:
        state.units = make(plan.mesh, has_units=True, divisor=options.gradient_divide_factor)
    for i, mesh in enumerate(plan.meshes):
        domain = make(mesh, domain=i + 1, divisor=plan.divisor)
        domain.runtime.join(state.runtime)
        state.others.append(domain)
    return state
