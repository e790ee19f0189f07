"""Lets the modules of a model read its sharded parameters, and optimizers step on them."""

from typing import cast

from torch import nn
from torch.distributed.tensor import DTensor

# These contribute members to the classes of sharded modules; generate.py imports unshard.py, which does, too.
import zcompile.sharding.recurrent
import zcompile.units.forward
import zcompile.unsharding.generate  # noqa: F401
from zcompile.ranks.connected_ranks import agreement_of
from zcompile.ranks.process_groups import is_fake, timeout_of
from zcompile.ranks.shared_errors import raised_on_all_ranks
from zcompile.sharding.class_swap import install_readers
from zcompile.sharding.plan import ShardPlan
from zcompile.state.ignored_parameters import UnreducedParameters
from zcompile.state.sharded_model import ShardedModel, models_of
from zcompile.training.optimizer_steps import count_steps
from zcompile.units.blocks import make_blocks, order_blocks
from zcompile.units.find import implementations
from zcompile.units.order import make_units, order_units


def install(model: nn.Module, plan: ShardPlan, state: ShardedModel) -> None:
    """Let the modules of `model` gather their parameters when they read them; all ranks together.

    Raises:
        RuntimeError: a rank could not; names it.
    """
    several = plan.mesh.size() > 1
    with raised_on_all_ranks(plan.mesh):
        units = make_units(state, model, plan.units)
        blocks = make_blocks(state, model)
        only_casts = not several and not state.others and plan.options.gradient_divide_factor in (None, 1.0)
        install_readers(state, model, plan.casts, only_casts and not _has_layouts(state), units=state.units)
    _connect(state)
    for each in models_of(state):
        count_steps(each)
    state.use_transport("auto")
    order_units(state, units)
    order_blocks(state, blocks)
    state.forward_checks.experts = implementations(model) if plan.gathers else []
    state.forward_checks.unreduced = UnreducedParameters(model) if several else None


def _connect(state: ShardedModel) -> None:
    """Let all ranks that wait for each other compare programs, if some of them share no shards."""
    models = models_of(state)
    meshes = [cast(DTensor, sharded.parameter).device_mesh for each in models for sharded in each.parameters.values()]
    if is_fake(state.mesh) or all(mesh == state.mesh for mesh in meshes):
        return
    timeout_s = timeout_of(state.mesh).total_seconds()
    agreement = agreement_of(list(dict.fromkeys(meshes)), state.groups, state.runtime, timeout_s)
    for each in models:
        each.wide_agreement = agreement


def _has_layouts(state: ShardedModel) -> bool:
    """Whether modules read a parameter otherwise than it is gathered."""
    return not all(sharded.layout.is_plain for each in models_of(state) for sharded in each.parameters.values())
