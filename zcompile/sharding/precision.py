"""The dtypes of parameters, inputs and outputs of each module, by FSDP2's mixed-precision policies.

A policy holds for a module and for those of its submodules that have no own policy. The model's policy is made of the
arguments of `zcompile.shard`. Parameters are gathered in `param_dtype`. Inputs are cast to `param_dtype` at the model,
at its repeated layers, at units, and at modules with an own policy. Outputs are cast to `output_dtype` at the model and
at modules with an own policy.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecision

from zcompile.sharding.class_swap import Casts, Contributor, contribute
from zcompile.state.attributes import CASTS
from zcompile.state.containers import map_tensors
from zcompile.state.forward_scope import never_compiled_alone
from zcompile.units.find import UnitLike

OwnPolicies = Mapping[UnitLike, MixedPrecision]


def policies_of(model: nn.Module, default: MixedPrecision, own: OwnPolicies) -> dict[nn.Module, MixedPrecision]:
    """Return module -> policy: its entry in `own`, else the policy of its parent, which is `default` for the model."""
    policies: dict[nn.Module, MixedPrecision] = {}
    to_visit = [(model, default)]
    while to_visit:
        module, around = to_visit.pop()
        policy = _own_policy(module, own) or around
        if policies.setdefault(module, policy) is policy:
            to_visit += [(child, policy) for child in reversed(list(module.children()))]
    return policies


def _own_policy(module: nn.Module, own: OwnPolicies) -> MixedPrecision | None:
    if module in own:
        return own[module]
    return next((policy for each, policy in own.items() if isinstance(each, type) and isinstance(module, each)), None)


def casts_of(
    model: nn.Module,
    policies: Mapping[nn.Module, MixedPrecision],
    own: OwnPolicies,
    casting: Iterable[nn.Module],
) -> dict[nn.Module, Casts]:
    """Return module -> the dtypes to which it casts its inputs and its outputs (None: no cast).

    `casting`: modules that cast their inputs, in addition to `model` and the modules with an entry in `own`.
    """
    root = getattr(model, "_orig_mod", model)  # of torch.compile
    with_own = {module for module in policies if _own_policy(module, own) is not None} | {root}
    casts: dict[nn.Module, Casts] = {}
    for module in {*casting, *with_own}:
        policy = policies[module]
        inputs = policy.param_dtype if policy.cast_forward_inputs else None
        casts[module] = inputs, policy.output_dtype if module in with_own else None
    return casts


def check_policies(
    model: nn.Module, default: MixedPrecision, own: OwnPolicies, ignored: Container[int]
) -> Exception | None:
    """Return the error of the first policy that cannot be used, or None. The caller raises the error on all ranks."""
    for policy in (default, *own.values()):
        if not isinstance(policy, MixedPrecision):
            return TypeError(f"zcompile.shard: the mapping `units` must have MixedPrecision values, not {policy!r}.")
        for dtype in (policy.param_dtype, policy.reduce_dtype, policy.output_dtype):
            if dtype is not None and not dtype.is_floating_point:
                return TypeError(
                    f"zcompile.shard: param_dtype, reduce_dtype and output_dtype must be floating-point, not {dtype}."
                )
    names = {module: path for path, module in model.named_modules()}
    for each in own:
        if all(module is not each and not (isinstance(each, type) and isinstance(module, each)) for module in names):
            return ValueError(f"zcompile.shard: the model has no {each!r}, for which `units` has a policy. Remove it.")
    first: dict[int, tuple[str, MixedPrecision]] = {}
    for module, policy in policies_of(model, default, own).items():
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            name = f"{names[module]}.{attribute}".removeprefix(".")
            other, its_policy = first.setdefault(id(parameter), (name, policy))
            if policy != its_policy:
                return ValueError(
                    f"zcompile.shard: parameter '{name}' is tied to '{other}', whose module has another policy of "
                    "mixed precision. Give both modules the same policy in `units`."
                )
    return None


@never_compiled_alone
def _cast(dtype: torch.dtype, container: Any) -> Any:
    """Return `container` with floating-point tensors cast to `dtype`; `container` itself if all have this dtype."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, container)


@never_compiled_alone
def _call_cast(call: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
    inputs, outputs = getattr(module, CASTS)
    if inputs is not None:
        args, kwargs = _cast(inputs, (args, kwargs))
    result = call(module, *args, **kwargs)
    return result if outputs is None else _cast(outputs, result)


contribute(
    Contributor(lambda base, kind: kind.casts != (None, None), lambda base, kind: {CASTS: kind.casts}, _call_cast)
)
