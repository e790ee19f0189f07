"""Operations of a step, for MFU: against the arithmetic of a decoder and of a mixture, and for models of one's own."""

import signal

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.cli import COMMANDS, Parser
from zcompile.explanation.llama import SIZES
from zcompile.explanation.workloads import Workload, load
from zcompile.profile import compare, report
from zcompile.profile.command import job_of
from zcompile.profile.flops import flops_of, grouped_product_flops


@pytest.mark.parametrize("precision, checkpointing", [("fp32", False), ("bf16", True), ("autocast", True)])
def test_a_decoder_takes_6n_and_12lds_operations_a_token(precision, checkpointing):
    """And no more under checkpoints, which compute blocks again. A lookup in the embedding is no product."""
    size, tokens = SIZES["tiny"], 2 * 64
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = load("tiny", None, 2, 64, checkpointing)
        counted = flops_of(workload, precision)
    weights = sum(parameter.numel() for parameter in workload.model.parameters() if parameter.ndim == 2)
    weights -= size.vocabulary * size.width
    assert counted == (6 * weights + 12 * size.layers * size.width * 64) * tokens


class Mixture(nn.Module):
    """Each token goes to two of eight experts, which are grouped products."""

    def __init__(self):
        super().__init__()
        self.first, self.router = nn.Linear(32, 32, bias=False), nn.Linear(32, 8, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(8, 32, 64)), nn.Parameter(torch.randn(8, 64, 32))

    def forward(self, x):
        x = self.first(x)
        scores, experts = self.router(x).topk(2)
        order = experts.flatten().argsort()
        ends = torch.zeros(8).scatter_add(0, experts.flatten(), torch.ones(experts.numel())).cumsum(0).int()
        hidden = torch._grouped_mm(x.repeat_interleave(2, 0)[order], self.up, ends)
        return (torch._grouped_mm(hidden, self.down, ends) * scores.flatten()[order, None]).sum()


def test_a_mixture_counts_the_experts_that_a_token_meets():
    with FakeTensorMode(allow_non_fake_inputs=True):
        counted = flops_of(Workload(Mixture(), lambda step, rank: torch.randn(48, 32), None), "bf16")
    first, router, of_two_experts = 2 * 32 * 32, 2 * 32 * 8, 2 * 2 * (32 * 64 + 64 * 32)
    assert counted == 48 * (2 * first + 3 * router + 3 * of_two_experts)  # nothing needs the gradient of the input


def test_grouped_products_of_two_stacks_count_each_group():
    assert grouped_product_flops(torch.Size((3, 5, 7)), torch.Size((3, 7, 11))) == 3 * 2 * 5 * 7 * 11


OWN = """
import torch
def build(): return torch.nn.Linear(4, 8, bias=False), lambda step, rank: torch.randn(16, 4), loss
def loss(model, batch): return model(batch).sum()
def build_that_looks(): return *build()[:2], lambda model, batch: loss(model, batch) * (1 + int(batch.sum() > 0))
def build_that_fails(): raise ValueError("no such weights\\non this machine")
"""


def counted_by(*arguments):
    """What `zcompile profile` counts."""
    return compare.count(job_of(Parser("profile", COMMANDS["profile"]).parse_args(arguments))[0])


def test_a_signal_waits_for_the_end_of_a_count(monkeypatch):
    """torch aborts if it comes while a fake tensor is dispatched."""
    counted = []

    def interrupted(job):
        signal.raise_signal(signal.SIGINT)
        counted.append(job)
        return {"parameters": 0}

    monkeypatch.setattr(compare, "count_step", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which pytest's workers ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            counted_by("--model", "tiny")
        assert counted and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def count_own(tmp_path):
    """What `zcompile profile` counts of a function in a file."""
    (tmp_path / "own.py").write_text(OWN)

    return lambda function: counted_by("--module", f"{tmp_path}/own.py:{function}", "--accumulation", "3")


def test_a_model_of_ones_own_is_counted(count_own):
    assert count_own("build") == {"parameters": 32, "flops": 3 * 2 * 2 * 16 * 32, "missing": []}


@pytest.mark.parametrize(
    "function, reason, parameters",
    [
        ("build_that_looks", "DataDependentOutputException: aten._local_scalar_dense.default", 32),
        ("build_that_fails", "ValueError: no such weights", None),
    ],
)
def test_a_model_that_cannot_be_counted_is_said_in_one_line(count_own, function, reason, parameters):
    counted = count_own(function)
    assert (counted["flops"], counted["parameters"]) == (None, parameters)
    says = [f"There is no MFU, because operations cannot be counted ({reason})."]
    assert report.predictions({"workload": counted, "engines": {}}) == says
