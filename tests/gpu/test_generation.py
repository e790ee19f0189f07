"""Generation, packed weights and export on GPUs."""

import copy
import functools

import pytest
import torch

import zcompile
from tests.support.architectures import VOCABULARY, hugging_face
from tests.support.gpu import sharded_over
from tests.support.models import batch
from tests.support.packed import Quantized, quantized_loss
from tests.support.ranks import on_gpus, slow
from tests.support.reference import train_beside


@pytest.mark.parametrize("inner", [None, pytest.param("aot_eager", marks=slow)])
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("transport", ["c10d", "p2p", pytest.param("delayed p2p", marks=slow)])
@on_gpus(2)
def test_ranks_stop_when_they_like(rank, world, transport, inner, how):
    torch.manual_seed(0)
    reference = hugging_face("llama").cuda()
    reference.generation_config.eos_token_id = None
    model = sharded_over(transport, copy.deepcopy(reference), inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    prompt = torch.randint(3, VOCABULARY, (2, 2 + 3 * rank), generator=generator).cuda()
    for step, lengths in enumerate(((5, 50), (50, 5))):
        arguments = {"max_new_tokens": lengths[rank], "do_sample": False, "pad_token_id": 0, **how}
        with torch.no_grad():
            for (name, tensor), parameter in zip(
                zcompile.full_parameters(model), reference.state_dict().values(), strict=True
            ):
                assert step > 0 or torch.equal(tensor, parameter), name
                parameter.copy_(tensor)  # what training changed
        expected = reference.generate(prompt, **arguments, disable_compile=True)
        assert torch.equal(model.generate(prompt, **arguments), expected)
        tokens = batch(step, rank).cuda()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


@pytest.mark.parametrize("inner", [None, "inductor"])
@pytest.mark.parametrize("transport", ["c10d", "p2p"])
@on_gpus(2)
def test_frozen_parameters_of_any_dtype_travel(rank, world, transport, inner):
    prepare = functools.partial(sharded_over, transport, inner=inner)
    train_beside(rank, world, prepare, make=lambda: Quantized().cuda(), loss=quantized_loss, tolerance=1e-4)
