"""DeepSpeed ZeRO-3 engines with and without the flag, side by side. Skips the importing test without DeepSpeed."""

import os

import pytest
import torch
from torch import nn

import zcompile  # noqa: F401  DeepSpeed's flag needs no more
from tests.support.deepspeed_config import MICROBATCHES, config_of
from tests.support.models import Transformer, batch, loss_of

os.environ.setdefault("DS_ACCELERATOR", "cpu")

deepspeed = pytest.importorskip("deepspeed")
stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes half a minute to build, and gloo serves as well


class LanguageModel(Transformer):
    """The test transformer, whose forward computes the loss. DeepSpeed cannot broadcast a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, tokens):
        return loss_of(super().forward, tokens)


needs_loss_backward = pytest.mark.skipif(
    not hasattr(stage3.DeepSpeedZeroOptimizer_Stage3, "exit_backward"), reason="this DeepSpeed wants engine.backward()"
)


def make_engine(flag, model=None, **config):
    """An engine of the config that `flag` and `config` make, see `config_of`."""
    torch.manual_seed(0)
    model = LanguageModel() if model is None else model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config_of(flag, **config))[0]


def train(engine, rank, begin=0, end=20, length=12):
    """For each microbatch of steps `begin` to `end`: its loss, and the gradient's norm if it ends a step, else 1."""
    curve = []
    for microbatch in range(begin * MICROBATCHES, end * MICROBATCHES):
        loss = engine(batch(microbatch, rank, length))
        engine.backward(loss)
        engine.step()
        ends_step = microbatch % MICROBATCHES == MICROBATCHES - 1
        curve.append((loss.item(), float(engine.get_global_grad_norm()) if ends_step else 1.0))
    return curve


def largest_differences(curve, expected):
    """The largest relative differences of two curves of `train`: of losses, and of norms."""
    pairs = list(zip(curve, expected, strict=True))
    return [max(abs(ours[i] - theirs[i]) / theirs[i] for ours, theirs in pairs) for i in (0, 1)]


def is_taken_over(engine):
    return engine.zcompile.state is not None


def assert_taken_over(engine):
    assert is_taken_over(engine), engine.zcompile.given_back


def beside_eager(drive, make=LanguageModel, flag=None, **config):
    """What `drive(engine)` returns of an eager engine, and of one with the flag, which is taken over in the end."""
    results = []
    for each in (None, flag or {}):
        torch.manual_seed(0)
        engine = make_engine(each, make(), **config)
        results.append(drive(engine))
        if each is not None:
            assert_taken_over(engine)
        engine.destroy()
    return results


def rank_trains_beside_eager(rank, world, flag, tolerances, config, length=12, end=20):
    """Losses and norms differ from those of eager ZeRO-3 by at most `tolerances`, relatively."""

    def drive(engine):
        curve = train(engine, rank, end=end, length=length)
        if hasattr(engine, "zcompile"):
            assert not engine.tput_timer.config.synchronized and engine.zcompile.lean_step.cut(0) is not None
        return curve

    expected, curve = beside_eager(drive, flag=flag, **config)
    differences = largest_differences(curve, expected)
    for difference, tolerance in zip(differences, tolerances, strict=True):
        assert difference <= tolerance, (differences, curve, expected)
    assert curve[0][0] > 1.1 * curve[-1][0]
