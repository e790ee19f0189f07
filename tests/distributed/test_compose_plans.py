"""Models of transformers by their own plans for tensor and expert parallelism, beside transformers with FSDP2."""

from itertools import product

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

import zcompile
from tests.support.parallel import maybe_compiled, mesh_of
from tests.support.plans import deepseek, filled, llama, neox, oss, qwen, tokens_loss
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import clipped_steps, close, same_values
from zcompile.integrations.huggingface import distribute

STEPS, INNERS = 3, ("eager", "aot_eager")
CASES = {
    "llama-tp": (llama, {"tp_size": 2, "fsdp_size": 2}),
    "neox-tp": (neox, {"tp_size": 2, "fsdp_size": 2}),  # rowwise layers have biases
    "qwen-tp": (qwen, {"tp_size": 2, "fsdp_size": 2}),  # experts are cut along other dimensions, and packed
    "qwen-ep": (qwen, {"fsdp_size": 4, "ep_size": 2}),
    "qwen-tp-ep": (qwen, {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}),
    "qwen-replicas-ep": (qwen, {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}),
    "oss-ep": (oss, {"fsdp_size": 4, "ep_size": 2}),  # experts have biases
    "deepseek-ep": (deepseek, {"fsdp_size": 4, "ep_size": 2}),
    "deepseek-ep-4": (deepseek, {"fsdp_size": 4, "ep_size": 4}),
    "deepseek-tp-ep": (deepseek, {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}),
}
FIRST = ("qwen-tp-ep", "eager")
OTHERS = [slow_case(*each) for each in product(CASES, INNERS) if each != FIRST]
data_rank_of = lambda rank, sizes: rank // sizes.get("tp_size", 1)


def config_of(sizes):
    from transformers.distributed import DistributedConfig

    return DistributedConfig(**sizes)


def steps_of(model, data_rank):
    """Losses, norms and losses of evaluations of steps."""
    for step, trained in enumerate(clipped_steps(model, tokens_loss, data_rank, 0.5, STEPS), STEPS):
        with torch.no_grad():
            evaluated = tokens_loss(model, step, data_rank)
        yield *trained, evaluated


@pytest.mark.parametrize("case, inner", [FIRST, *OTHERS])
@on_ranks(4)
def test_models_train_and_evaluate_as_with_fsdp2(rank, world, tmp_path, case, inner):
    make, sizes = CASES[case]
    whole, data_rank = filled(make), data_rank_of(rank, sizes)
    if rank == 0:
        whole.save_pretrained(tmp_path)
    torch.distributed.barrier()
    theirs = type(whole).from_pretrained(tmp_path, distributed_config=config_of(sizes), dtype=torch.float32)
    ours = maybe_compiled(distribute(whole, config_of(sizes)), inner, fullgraph=False)
    for mine, other in zip(steps_of(ours, data_rank), steps_of(theirs, data_rank), strict=True):
        for kind, value, right in zip(("loss", "norm", "evaluation"), mine, other, strict=True):
            close(value, right, 1e-6, kind)
    for module in theirs.modules():
        if isinstance(module, FSDPModule):  # some of them stay unsharded behind an evaluation
            module.reshard()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        close(mine, other.full_tensor(), 1e-6, name)


@pytest.mark.parametrize("case", ["qwen-tp-ep", slow_case("deepseek-ep")])
@on_ranks(4)
def test_models_made_on_the_meta_device_load_whole_state_dicts(rank, world, case):
    """Made on the meta device, where only a state dict gives values; beside one that was sharded with them."""
    make, sizes = CASES[case]
    with_values = distribute(filled(make), config_of(sizes))
    with torch.device("meta"):
        model = make()
    distribute(model, config_of(sizes))
    whole = get_model_state_dict(with_values, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole if rank == 0 else {}, options=options)
    for (name, mine), other in zip(model.named_parameters(), with_values.named_parameters(), strict=True):
        assert (name, mine.placements, mine.device_mesh) == (other[0], other[1].placements, other[1].device_mesh)
        assert torch.equal(mine.to_local(), other[1].to_local()), name
    data_rank = data_rank_of(rank, sizes)
    losses = [tokens_loss(each, 0, data_rank) for each in (model, with_values)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    same_values(*([parameter.grad for parameter in each.parameters()] for each in (model, with_values)))


@on_ranks(4)
def test_a_model_is_saved_whole_by_save_pretrained(rank, world, tmp_path):
    make, sizes = CASES["qwen-tp-ep"]
    whole = filled(make)
    distribute(filled(make), config_of(sizes)).save_pretrained(tmp_path)
    torch.distributed.barrier()
    loaded = type(whole).from_pretrained(tmp_path, dtype=torch.float32)
    same_values(loaded, whole)


@on_ranks(4)
def test_what_distribute_does_not_do_is_refused(rank, world):
    refused = {
        "fsdp_plan is for FSDP2": ({"fsdp_size": 4, "fsdp_plan": {"lm_head": "free_full_weight"}}, {}),
        "fsdp_mixed_precision is for FSDP2": ({"fsdp_size": 4, "fsdp_mixed_precision": True}, {}),
        "pipeline parallelism is not supported": ({"pp_size": 4}, {}),
        "distributed_config sets mesh": ({"fsdp_size": 4}, {"mesh": None}),
        "has no `ep_plan`": ({"fsdp_size": 4, "ep_size": 2}, {}),
    }
    for text, (sizes, options) in refused.items():
        with pytest.raises(ValueError, match=text):
            distribute(llama(), config_of(sizes), **options)


@slow
@on_ranks(4)
def test_hooks_of_a_plan_that_the_program_applies_are_an_error(rank, world):
    """Its hooks would sum gradients of norms that are shards here."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh, model = mesh_of("cpu", dp=2, tp=2), filled(qwen)
    tp_plan, _, _ = model._resolve_parallel_plans(config_of({"tp_size": 2}))
    apply_tensor_parallelism(model, mesh["tp"], tp_plan)
    experts = {p for name, p in model.named_parameters() if ".experts." in name}
    local = zcompile.Placement(local=True)
    zcompile.shard(model, mesh["dp"], shard_placement_fn=lambda parameter: local if parameter in experts else None)
    loss = tokens_loss(model, 0, rank // 2)
    with pytest.raises(NotImplementedError, match="allreduce_"):
        loss.backward()
