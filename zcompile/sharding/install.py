"""Lets the modules of a model gather the sharded parameters that they read."""

from torch import nn

# Each import adds members to the classes of sharded modules; generate.py imports unshard.py, which does so, too.
import zcompile.sharding.recurrent
import zcompile.units.forward
import zcompile.unsharding.generate  # noqa: F401
from zcompile.sharding.class_swap import install_readers
from zcompile.sharding.late_hooks import follow_hooks
from zcompile.sharding.plan import ShardPlan
from zcompile.state.forward_checks import UnreducedParameters
from zcompile.state.sharded_model import ShardedModel, install_leaves, models_of
from zcompile.units.blocks import make_blocks, order_blocks
from zcompile.units.order import make_units, order_units


def install(model: nn.Module, plan: ShardPlan, state: ShardedModel) -> None:
    """Let the modules of `model` gather each parameter when they read it. Calls no collective."""
    several, divides = plan.mesh.size() > 1, plan.options.gradient_divide_factor not in (None, 1.0)
    install_leaves(state)
    order_units(state, make_units(state, model, plan.units))
    order_blocks(state, make_blocks(state, model))
    state.forward_checks.experts = plan.experts
    state.forward_checks.unreduced = UnreducedParameters(model) if several else None
    layouts = [sharded.layout for each in models_of(state) for sharded in each.parameters.values()]
    only_casts = not (several or state.others or divides) and all(layout.is_plain for layout in layouts)
    state.before_first_forward = follow_hooks
    install_readers(state, model, plan.casts, only_casts, units=state.units)
