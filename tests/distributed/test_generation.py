"""`model.generate()` of a sharded model: ranks stop when they like, and have the tokens of the unsharded model."""

import functools
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.architectures import VOCABULARY, hugging_face, hugging_face_loss
from tests.support.meshes import short_mesh
from tests.support.models import Transformer, batch
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import compiled, pair, train_beside
from tests.support.time_limits import scaled

pytest.importorskip("transformers")
SECONDS = scaled(60.0)  # the timeout of what would hang


def eager(model):
    return zcompile.shard(model, short_mesh(SECONDS))


def compiled_loosely(model, inner="aot_eager"):
    return compiled(model, inner=inner, fullgraph=False, mesh=short_mesh(SECONDS))


def make(name="llama", **how):
    model = hugging_face(name, **how).eval()
    model.generation_config.eos_token_id = None  # each rank goes on to the length that it is told
    return model


def prompt_of(rank, seed=0):
    generator = torch.Generator().manual_seed(seed + 100 * rank)
    return torch.randint(3, VOCABULARY, (2, 2 + 3 * rank), generator=generator)


def greedy(length, **how):
    return {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0, **how}


def generate_beside(rank, name, prepare, how):
    reference, model = pair(functools.partial(make, name), prepare)
    for lengths in ((5, 50, 7, 9), (50, 5, 20, 5)):
        arguments = greedy(lengths[rank], return_dict_in_generate=True, **how)
        ours = model.generate(prompt_of(rank), **arguments)
        theirs = reference.generate(prompt_of(rank), **arguments)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert ours.sequences.shape[1] >= lengths[rank]
        # nothing was computed that this rank did not ask for
        lengths = [each.past_key_values.get_seq_length() for each in (ours, theirs)]
        assert lengths[0] == lengths[1]


STATIC = {"cache_implementation": "static"}


@pytest.mark.parametrize(
    ("prepare", "how"),
    [
        (eager, {}),
        (eager, STATIC),
        slow_case(compiled_loosely, {}),
        slow_case(eager, {"prefill_chunk_size": 2}),
        slow_case(compiled_loosely, STATIC),
        slow_case(functools.partial(compiled_loosely, inner="inductor"), STATIC),
    ],
)
def test_tokens_are_those_of_the_unsharded_model(rank, world, prepare, how):
    generate_beside(rank, "llama", prepare, how)


@slow
@pytest.mark.parametrize("name", ["llama", "t5", "gpt2", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("prepare", [eager, compiled_loosely])
@pytest.mark.parametrize("world", [2, 4])
def test_tokens_of_other_models_and_worlds(rank, world, name, prepare):
    generate_beside(rank, name, prepare, {})


@slow
@on_ranks(4)
def test_replicas_stop_when_they_like(rank, world):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    generate_beside(rank, "llama", lambda model: zcompile.shard(model, mesh), {})


@slow
def test_transformers_may_compile_with_zcompile(rank, world):
    from transformers import CompileConfig

    config = CompileConfig(backend="zcompile", mode=None, options={"inner": "aot_eager"})
    config._compile_all_devices = True
    generate_beside(rank, "llama", eager, {**STATIC, "compile_config": config})


@pytest.mark.parametrize("prepare", [eager, slow_case(compiled_loosely)])
@pytest.mark.parametrize("seeds", [range(5), slow_case(range(100))])
@on_ranks(2, timeout=600)
def test_ranks_stop_early_at_random(rank, world, prepare, seeds):
    reference, model = pair(make, prepare)
    for seed in seeds:
        choice = random.Random(1000 * seed + rank)
        how = {
            "max_new_tokens": choice.randint(5, 50),
            "do_sample": seed % 2 == 0,  # else greedy
            "pad_token_id": 0,
            "eos_token_id": choice.sample(range(3, VOCABULARY), 8),  # of which one comes soon
            "num_beams": random.Random(seed).choice([1, 1, 3]),
        }
        results = []
        for each in (model, reference):
            torch.manual_seed(seed)
            results.append(each.generate(prompt_of(rank, seed), **how))
        assert torch.equal(*results), seed


@pytest.mark.parametrize("prepare", [eager, slow_case(compiled_loosely)])
def test_training_goes_on_after_a_generation(rank, world, prepare):
    def generate(model, reference, step):
        how = greedy(3 + 5 * ((rank + step) % 2))
        assert torch.equal(*(each.generate(prompt_of(rank), **how) for each in (model, reference)))

    loss = functools.partial(hugging_face_loss, "llama")
    train_beside(rank, world, prepare, make=lambda: make().train(), loss=loss, steps=3, after_step=generate)


def test_an_error_of_one_rank_ends_generation_on_all(rank, world):
    reference, model = pair(make, eager)
    prompt = prompt_of(rank)[:1]
    for length in (2, 20):  # rank 0 is through before rank 1 raises, or not
        if rank == 1:
            puts = mock.Mock(side_effect=[None, None, None, ValueError("broken on purpose")])
            with pytest.raises(ValueError, match="broken on purpose"):
                model.generate(prompt, **greedy(20), streamer=mock.Mock(put=puts))
        else:
            with pytest.raises(RuntimeError, match=r"rank 1 of the mesh raised inside of generate.*on rank 0, too"):
                model.generate(prompt, **greedy(length))
    assert torch.equal(*(each.generate(prompt, **greedy(4 + rank)) for each in (model, reference)))


def test_a_rank_that_trains_instead_is_told(rank, world):
    model = zcompile.shard(make().train(), short_mesh(scaled(3)))
    told = r"rank 0 waited for the other ranks in generate|rank 1 did not get 'model.*' from other"
    with pytest.raises(RuntimeError, match=told):
        if rank == 0:
            model.generate(prompt_of(0), **greedy(5))
        else:
            hugging_face_loss("llama", model, 0, rank).backward()


@pytest.mark.parametrize("prepare", [slow_case(compiled_loosely), eager])
def test_a_rank_generates_alone_inside_of_unshard(rank, world, prepare):
    reference, model = pair(make, prepare)
    with zcompile.unshard(model):
        zcompile.reset_stats(model)
        for length in (30, 4) if rank == 0 else ():
            assert torch.equal(*(each.generate(prompt_of(0), **greedy(length)) for each in (model, reference)))
        assert zcompile.stats(model)["gathers"] == 0
    assert torch.equal(*(each.generate(prompt_of(rank), **greedy(2 + rank)) for each in (model, reference)))


class Generates(Transformer):
    """A model with a `generate` of its own, as programs without transformers have it."""

    @torch.no_grad()
    def generate(self, tokens, length):
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
        return tokens


def test_a_generate_of_the_users_own(rank, world):
    reference, model = pair(Generates, eager)
    for length in (1 + 4 * rank, 5 - 4 * rank, 3):
        assert torch.equal(*(each.generate(batch(0, rank), length) for each in (model, reference)))


def test_units_need_forwards_on_all_ranks(rank, world):
    reference, model = pair(functools.partial(make, "mixtral", experts="eager"), eager)
    with pytest.raises(RuntimeError, match=r"rank 0 of the mesh has finished.*synced_gpus=True.*zcompile.unshard"):
        model.generate(prompt_of(rank), **greedy(3 + 5 * rank))
    how = greedy(3 + 5 * rank, synced_gpus=True)
    ours, how["synced_gpus"] = model.generate(prompt_of(rank), **how), False
    assert torch.equal(ours, reference.generate(prompt_of(rank), **how))


@on_ranks(2, needs="peft")
def test_a_model_of_peft_generates(rank, world):
    import peft

    def adapted():
        model = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
        return model

    reference, model = pair(adapted, eager)
    how = greedy(3 + 9 * rank)
    assert torch.equal(*(each.generate(input_ids=prompt_of(rank), **how) for each in (model, reference)))
