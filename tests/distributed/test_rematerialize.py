"""What backward computes again instead of reading it from memory. This needs no ranks, but Inductor takes its time."""

from dataclasses import replace

import pytest
import torch

from tests.support.decoder import SIZE
from zcompile.explanation.llama import Llama


def saved_bytes_and_gradients(size, options):
    """Bytes that a step of a decoder saves for backward, as autograd sees them, and its gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Llama(size)
    model.compile(backend="zcompile", options=options)
    storages: dict[int, int] = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randint(0, size.vocabulary, (2, 25), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens)
    loss.backward()
    return sum(storages.values()), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rematerialized_is_what_products_read_of_pointwise_kernels(inner):
    """The results of norms and of the gated activation are not saved, and gradients stay the same."""
    size = replace(SIZE, layers=2)
    saved, expected = saved_bytes_and_gradients(size, {"inner": inner, "rematerialize": False})
    fewer, gradients = saved_bytes_and_gradients(size, {"inner": inner, "rematerialize": True})
    rows, width = 2 * 24, 4
    made_again = size.layers * rows * (2 * size.width + size.hidden) + rows * size.width
    attended = size.layers * rows * size.width  # Inductor's copy of what attention returns, with its heads side by side
    assert saved - fewer == (made_again + attended * (inner == "inductor")) * width
    exact = {"rtol": 0, "atol": 0} if inner == "aot_eager" else {"rtol": 1e-5, "atol": 1e-7}
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **exact)
