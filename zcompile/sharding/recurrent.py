"""Recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`), whose forward reads the list `_flat_weights`.

torch keeps this list beside `_parameters`, so it would keep the original, unsharded parameters. Sharded layers have a
property in its place, which reads each parameter as an attribute, and so gathers it.
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
        "flatten_parameters": _nothing,  # it copies weights to one buffer for cuDNN; each forward gathers new weights
    }


def forget_flat_weights(module: nn.Module) -> None:
    module.__dict__.pop("_flat_weights", None)


def restore_flat_weights(module: Any) -> None:
    module._init_flat_weights()


contribute(
    Contributor(
        lambda base, kind: issubclass(base, nn.RNNBase),
        recurrent_members,
        swapped=forget_flat_weights,
        restored=restore_flat_weights,
    )
)
