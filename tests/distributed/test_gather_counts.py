"""How often eager code gathers: as FSDP2, each parameter once in forward and, of blocks, once in backward."""

import pytest
import torch
from torch import nn

import zcompile
from tests.support.architectures import hugging_face
from tests.support.blocks import shard_in_blocks
from tests.support.ranks import on_ranks

TOKENS = torch.arange(10).view(2, 5)


class PassesOn(nn.Module):
    """Blocks that return what they were given, too, as those of T5 do with their position bias."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(3))
        for layer in self.layers:
            layer.register_forward_hook(lambda module, given, result: (result, given[1]))

    def forward(self, input_ids, labels):
        x = torch.nn.functional.one_hot(input_ids % 4, 4).float()
        bias = self.bias(x)
        for layer in self.layers:
            x, bias = layer(x, bias)
        return {"loss": x.square().mean()}


def t5():
    return hugging_face("t5")


def lora_on_all_linears():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(hugging_face("llama"), LoraConfig(r=2, target_modules="all-linear"))


@pytest.mark.parametrize("make", [PassesOn, t5, lora_on_all_linears])
@on_ranks(2)
def test_each_parameter_is_gathered_once_in_forward_and_in_backward(rank, world, make):
    if make is not PassesOn:
        pytest.importorskip("transformers")
    if make is lora_on_all_linears:
        pytest.importorskip("peft")
    model = shard_in_blocks(make())
    whole = sum(each.nbytes for each in model.parameters())
    for _ in range(2):
        zcompile.reset_stats(model)
        loss = model(input_ids=TOKENS, labels=TOKENS)["loss"]
        assert sum(zcompile.stats(model)["gathered_bytes"].values()) == whole
        loss.backward()
        assert whole < sum(zcompile.stats(model)["gathered_bytes"].values()) <= 2 * whole
