"""Recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`): what their forward reads is the list `_flat_weights`.

torch keeps that list beside the table of parameters, so the properties of class_swap.py alone would leave it unsharded.
Here it is a property too. A forward gathers all weights of its layer together, in one transfer, and drops them at its
end.
"""

from typing import Any

import torch
from torch import nn

from zcompile.sharding.class_swap import Contributor, Kind, contribute
from zcompile.state.attributes import LEAF, SHARDED
from zcompile.state.forward_scope import never_compiled_alone

gather_group = torch.ops.zcompile.gather_group.default

_GATHERED = "_zcompile_flat_weights"  # the weights in the order of `_flat_weights_names`, while forward runs


def recurrent_members(base: type, kind: Kind) -> dict[str, Any]:
    """Members for the class of a sharded recurrent layer."""
    one_by_one = kind.single_rank or kind.in_unit  # a read of a weight then starts no transfer

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the graph's passes then see to it that each weight travels once
            return super(type(self), self).forward(*args, **kwargs)
        gather_all = _read_one_by_one if one_by_one else _gather_together
        self.__dict__[_GATHERED] = gather_all(self)
        try:
            return super(type(self), self).forward(*args, **kwargs)
        finally:
            del self.__dict__[_GATHERED]

    def flat_weights(self: Any) -> list[torch.Tensor | None]:
        if torch.compiler.is_compiling():
            return _read_one_by_one(self)
        gathered: list[torch.Tensor | None] | None = self.__dict__.get(_GATHERED)
        return [self._parameters.get(name) for name in self._flat_weights_names] if gathered is None else gathered

    return {
        "forward": never_compiled_alone(forward),
        "_flat_weights": property(never_compiled_alone(flat_weights), lambda self, value: None),
        "_init_flat_weights": _nothing,  # torch calls it after `_apply`
        "_update_flat_weights": _nothing,  # torch calls it at the beginning of each forward
        "flatten_parameters": _nothing,  # one block of memory for cuDNN: gathered weights are new in each forward
    }


def forget_flat_weights(module: nn.Module) -> None:
    """Drop torch's list of unsharded weights of a recurrent layer."""
    module.__dict__.pop("_flat_weights", None)


def restore_flat_weights(module: Any) -> None:
    """Give a recurrent layer, which is of torch's class again, torch's list of weights."""
    module._init_flat_weights()


def _nothing(self: Any) -> None:
    pass


@never_compiled_alone
def _read_one_by_one(self: Any) -> list[torch.Tensor | None]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


@never_compiled_alone
def _gather_together(self: Any) -> list[torch.Tensor | None]:
    """All weights of the layer, gathered in one transfer. One by one where some are not sharded, or others for now."""
    names: list[str] = self._flat_weights_names
    parameters = [self._parameters.get(name) for name in names]
    own = [self.__dict__.get(SHARDED + name) for name in names]
    if any(each is None or each.parameter is not parameter for each, parameter in zip(own, parameters)):
        return _read_one_by_one(self)
    leaves = [self.__dict__[LEAF + name] for name in names]
    is_plain = all(each.layout.is_plain and each.layout.domain == 0 for each in own)
    dtypes = {each.layout.dtype or leaf.dtype for each, leaf in zip(own, leaves)}
    if len(dtypes) > 1 or not is_plain:
        return _read_one_by_one(self)
    for leaf, parameter in zip(leaves, parameters):
        leaf.requires_grad_(parameter.requires_grad)
    sizes = [size for parameter in parameters for size in parameter.shape]
    dims = [parameter.ndim for parameter in parameters]
    gathered: list[torch.Tensor | None] = gather_group(leaves, sizes, dims, dtypes.pop())
    return gathered


contribute(
    Contributor(
        lambda base, kind: issubclass(base, nn.RNNBase),
        recurrent_members,
        swapped=forget_flat_weights,
        restored=restore_flat_weights,
    )
)
