"""LoRA by PEFT on a sharded model: a frozen base that is gathered and never reduced, and adapters that train."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.architectures import hugging_face, hugging_face_loss
from tests.support.ranks import slow, slow_case
from tests.support.reference import FP32, close, compiled, losses_of, pair, same_values, train_beside

peft = pytest.importorskip("peft")
TARGETS = ["q_proj", "v_proj", "down_proj"]
loss = functools.partial(hugging_face_loss, "llama")


def with_lora(**config) -> nn.Module:
    how = {"r": 3, "lora_alpha": 8, "target_modules": TARGETS} | config
    model = peft.get_peft_model(hugging_face("llama"), peft.LoraConfig(**how))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


compiled_loosely = functools.partial(compiled, fullgraph=False)
by_inductor = functools.partial(compiled_loosely, inner="inductor")
PREPARE = [zcompile.shard, slow_case(compiled_loosely, id="compiled"), slow_case(by_inductor, id="inductor")]


@pytest.mark.parametrize("prepare", PREPARE)
def test_lora_trains_as_one_process_does(rank, world, prepare):
    model = train_beside(rank, world, prepare, make=with_lora, loss=loss, steps=3)
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


@pytest.mark.parametrize("prepare", PREPARE[:2])
def test_the_base_is_gathered_and_never_reduced(rank, world, prepare):
    reference, model = pair(with_lora, prepare)
    trained = sum(each.nbytes for each in reference.parameters() if each.requires_grad)
    base = sum(each.nbytes for each in reference.parameters() if not each.requires_grad)
    loss(model, 0, rank).backward()
    zcompile.reset_stats(model)
    result = loss(model, 0, rank)
    assert zcompile.stats(model)["gathered_bytes"]["float32"] >= base  # nothing of it stays
    result.backward()
    assert zcompile.stats(model)["reduced_bytes"] == {"float32": trained}


@slow
@pytest.mark.parametrize(
    "world, prepare, config",
    [
        *((world, prepare, {}) for world in (2, 4) for prepare in (zcompile.shard, compiled_loosely)),
        (2, zcompile.shard, {"use_dora": True}),
        (2, zcompile.shard, {"target_modules": ["embed_tokens", "v_proj"]}),
    ],
)
def test_merged_and_unmerged_weights_are_those_of_one_process(rank, world, prepare, config):
    reference, model = pair(functools.partial(with_lora, **config), prepare)
    original = copy.deepcopy(reference)
    torch.testing.assert_close(loss(model, 0, rank), loss(reference, 0, rank))
    for safe_merge in (False, True):  # the latter assigns to `.data`
        for each in (model, reference):
            each.merge_adapter(safe_merge=safe_merge)
        same_values(model, reference)
        with torch.no_grad():
            torch.testing.assert_close(loss(model, 1, rank), loss(reference, 1, rank))
        for each in (model, reference):
            each.unmerge_adapter()
        same_values(model, reference)
        for (name, ours), theirs in zip(model.named_parameters(), original.parameters(), strict=True):
            close(ours, theirs, FP32, name)
    loss(model, 0, rank).backward()  # adapters train again
    assert all((each.grad is not None) == each.requires_grad for each in model.parameters())
    merged = [each.merge_and_unload() for each in (model, reference)]
    same_values(*merged)
    torch.testing.assert_close(*(loss(each, 1, rank) for each in merged))


def test_an_unmerge_inside_of_a_forward_is_refused(rank, world):
    model = zcompile.shard(with_lora())
    model.merge_adapter()
    with model.disable_adapter(), pytest.raises(RuntimeError, match=r"q_proj.*inside of a forward or backward"):
        loss(model, 0, rank)  # which would unmerge


def test_an_assignment_to_data_that_would_be_lost_raises(rank, world):
    model = zcompile.shard(hugging_face("llama"))
    expected = loss(model, 0, rank)
    for use in (lambda: loss(model, 0, rank), model.state_dict):
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * 2
        with pytest.raises(RuntimeError, match=r"'.data' of parameter 'model.layers.0.mlp.up_proj.weight' and 1 more"):
            use()
        assert torch.equal(loss(model, 0, rank), expected)  # the weights are as they were
    with zcompile.unshard(model, writeback=True):
        model.lm_head.weight.data = model.lm_head.weight.data * 2
    assert not torch.equal(loss(model, 0, rank), expected)
    model.to(torch.float64)  # which exchanges parameters by itself
    assert loss(model, 0, rank).isfinite() and model.lm_head.weight.dtype == torch.float64


@slow
def test_adapters_alone_are_saved_and_loaded_in_one_process(rank, world, tmp_path):
    model = zcompile.shard(with_lora())
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses_of(model, loss, rank, 4, torch.optim.AdamW(adapters, lr=1e-2))
    zcompile.reset_stats(model)
    with zcompile.unshard(adapters):
        gathered = zcompile.stats(model)["gathered_bytes"]["float32"]
        model.save_pretrained(tmp_path, is_main_process=rank == 0)
    assert gathered == sum(each.numel() * each.itemsize for each in adapters)
    dist.barrier()
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(hugging_face("llama"), tmp_path)
    same_values(model, loaded)
    torch.testing.assert_close(loss(model, 5, rank), loss(loaded, 5, rank))
