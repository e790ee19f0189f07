"""Every model of transformers that can be made small, and some of diffusers', sharded over two ranks, beside itself
unsharded. Both are compiled.

`make models` runs a task of `tests/support/architectures.py` at a time, for minutes to an hour, by
ZCOMPILE_ARCHITECTURES=causal and so on. ZCOMPILE_ARCHITECTURES_INNER=inductor takes another inner backend than
aot_eager, for both. With ZCOMPILE_ARCHITECTURES_DEVICE=cuda the ranks train in fp64 on GPUs, of which one is enough.
"""

import os

import pytest
import torch

from tests.support.architectures import CannotBeMade, kinds, loss_of, small
from tests.support.ranks import Ranks, slow_case
from tests.support.reference import compiled, train_beside

TASK = os.environ.get("ZCOMPILE_ARCHITECTURES", "")
INNER = os.environ.get("ZCOMPILE_ARCHITECTURES_INNER", "aot_eager")
DEVICE = os.environ.get("ZCOMPILE_ARCHITECTURES_DEVICE", "cpu")
TOLERANCE = 2e-4  # of gradients: some multiply by their width, or scale a softmax up
LOSS_TOLERANCE, PARAMETER_TOLERANCE = 1e-5, 5e-5


def rank_trains(rank, world, task, kind, inner):
    """Three steps beside the unsharded model, both compiled; or why it cannot be made."""
    if DEVICE != "cpu":  # in fp32, convolutions of two layouts differ in the third digit behind a batch norm
        torch.set_default_dtype(torch.float64)
    try:
        _compiles_unsharded(task, kind, inner)

        def prepare(model):
            return compiled(model, inner=inner, fullgraph=False)

        def make():
            model = small(task, kind).to(DEVICE, torch.get_default_dtype())
            model.compile(backend=inner)  # `prepare` compiles its own in another way
            return model

        train_beside(
            rank, world, prepare, make=make, loss=loss_of(task), steps=3,
            tolerance=TOLERANCE, loss_tolerance=LOSS_TOLERANCE, parameter_tolerance=PARAMETER_TOLERANCE,
        )  # fmt: skip
    except CannotBeMade as reason:
        return str(reason)
    finally:
        torch.set_default_dtype(torch.float32)


def _compiles_unsharded(task, kind, inner):
    tried = small(task, kind).to(DEVICE, torch.get_default_dtype())
    tried.compile(backend=inner)
    try:
        loss_of(task)(tried, 0, 0).backward()
    except Exception as error:
        raise CannotBeMade(f"it does not compile unsharded: {error}") from error


@pytest.fixture(scope="module")
def two_ranks(ranks):
    if DEVICE == "cpu":
        yield ranks(2)
        return
    pool = Ranks(2, "nccl")
    yield pool
    pool.stop()


KINDS = {
    "images": "resnet convnext regnet mobilenet_v2 poolformer vit swin pvt",
    "segmentation": "segformer mobilevit",
    "ctc": "wav2vec2 hubert sew",
    "audio": "audio-spectrogram-transformer wavlm",
    "speech": "whisper speech_to_text speecht5",
    "diffusion": "unet unet-conditioned dit vae flux",
    "causal": "gpt2 llama mixtral mamba",
    "masked": "bert deberta-v2",
    "seq2seq": "t5 bart",
    "vision-language": "llava qwen3_vl",
}

IN_CI = ("diffusion", "dit", "aot_eager")  # of transformers, tests/distributed/test_training.py has a model


CASES = [(task, kind, inner) for inner in ("inductor", "aot_eager") for task in KINDS for kind in KINDS[task].split()]
if TASK:
    CASES = [(TASK, kind, INNER) for kind in kinds(TASK)]


@pytest.mark.parametrize("task, kind, inner", [case if TASK or case == IN_CI else slow_case(*case) for case in CASES])
def test_models_train_as_unsharded(two_ranks, task, kind, inner):
    """Importing diffusers takes most of the time."""
    reasons = two_ranks.run(rank_trains, task, kind, inner, timeout=600)
    if TASK and reasons[0]:
        pytest.skip(f"{kind} cannot be made small or be compiled: {reasons[0].splitlines()[0][:200]}")
    assert reasons == [None, None]
