"""A module that raises when it is told to, in forward or in backward."""

import pytest
import torch
from torch import nn

RAISES: list = []  # not empty: `may_raise` raises


@torch.library.custom_op("zcompile_tests::may_raise_here", mutates_args=())
def may_raise(x: torch.Tensor) -> torch.Tensor:
    if RAISES:
        raise RuntimeError("broken on purpose")
    return x.clone()


may_raise.register_fake(torch.empty_like)
may_raise.register_autograd(lambda context, grad: may_raise(grad))


class Fault(Exception):
    """What tests raise."""


def fail(*args):
    raise Fault


def raises(error, text, call, *args, **how):
    with pytest.raises(error, match=text):
        call(*args, **how)


class MayRaise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return may_raise(x)
