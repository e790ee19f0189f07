"""Recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`), whose forward reads the list `_flat_weights`.

torch keeps this list in addition to `_parameters`, so the list would go on holding unsharded parameters. Sharded layers
have a property in place of the list. It reads each parameter as an attribute, which gathers the parameter.
"""

from typing import Any

import torch
from torch import nn

from zcompile.sharding.class_swap import Contributor, Kind, contribute
from zcompile.state.forward_scope import never_compiled_alone


@never_compiled_alone
def _flat_weights(self: Any) -> list[torch.Tensor | None]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _nothing(self: Any) -> None:
    pass


def recurrent_members(base: type, kind: Kind) -> dict[str, Any]:
    return {
        "_flat_weights": property(_flat_weights, lambda self, value: None),
        "_init_flat_weights": _nothing,  # torch calls it after `_apply`
        "_update_flat_weights": _nothing,  # torch calls it at the beginning of each forward
        "flatten_parameters": _nothing,  # one buffer for cuDNN is no use: each forward gathers new weights
    }


def forget_flat_weights(module: nn.Module) -> None:
    """Drop torch's list of unsharded weights of a recurrent layer."""
    module.__dict__.pop("_flat_weights", None)


def restore_flat_weights(module: Any) -> None:
    """Rebuild the list `_flat_weights` of a recurrent layer, after the layer has got its own class back."""
    module._init_flat_weights()


contribute(
    Contributor(
        lambda base, kind: issubclass(base, nn.RNNBase),
        recurrent_members,
        swapped=forget_flat_weights,
        restored=restore_flat_weights,
    )
)
