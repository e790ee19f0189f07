"""What the profiler is given: engines with options, models, and arguments that it refuses in one line; operations of a
step, for MFU, against the arithmetic of a decoder and of a mixture.
"""

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.cli import COMMANDS, Parser, main
from zcompile.explanation.llama import SIZES
from zcompile.explanation.workloads import Workload, load
from zcompile.profile import compare, report
from zcompile.profile.command import job_of
from zcompile.profile.engines import file_name, find, names_of
from zcompile.profile.flops import flops_of, grouped_product_flops
from zcompile.profile.torch_engines import blocks_of


def test_options_in_the_names_of_engines():
    text = (
        'fsdp2,zcompile:skip_passes=["regather","bucket"]:inductor={"max_autotune":true,"epilogue_fusion":false}'
        ":transport=nccl,ddp"
    )
    names = names_of(text)
    assert [name.partition(":")[0] for name in names] == ["fsdp2", "zcompile", "ddp"]
    inductor = {"max_autotune": True, "epilogue_fusion": False}
    assert find(names[1])[1] == {"skip_passes": ["regather", "bucket"], "inductor": inductor, "transport": "nccl"}
    assert re.fullmatch(r"[\w.=+-]+", file_name(names[1]))


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """A folder of configs as in a Hugging Face model's folder, which says in which dtype its weights are."""
    folder = tmp_path_factory.mktemp("configs")
    for name, more in (("llama", {"hidden_size": 32, "intermediate_size": 64, "attention_dropout": 0.1}), ("t5", {})):
        sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
        (folder / name).mkdir()
        config = {"model_type": name, "torch_dtype": "bfloat16", **sizes, **more}
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def test_hugging_face_models_are_fp32_and_without_dropout(configs):
    workload = load(f"{configs}/llama", None, 2, 16, False)
    assert {parameter.dtype for parameter in workload.model.parameters()} == {torch.float32}
    batch = workload.batch(0, 0)
    assert batch.shape == (2, 17) and torch.equal(workload.model(batch), workload.model(batch))
    assert not torch.equal(batch, workload.batch(0, 1)) and not torch.equal(batch, workload.batch(1, 0))


def test_blocks_are_of_the_outermost_lists():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    model = nn.ModuleDict({"layers": layers, "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    assert blocks_of(model) == [*layers, model["head"][0]]
    assert blocks_of(model["head"][0]) == [model["head"][0]]


def build():
    """What `--module` names below. Its arguments are refused before it is called."""
    raise AssertionError


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--engines", "zcompile,fast"], "no engine 'fast'; there are zcompile, zcompile+blocks"),
        (["--engines", "zcompile:fast=1"], "unknown option 'fast'"),
        (["--engines", "zcompile:transport"], "reads key=value, not 'transport'"),
        (["--engines", "zcompile:inductor=3"], "option 'inductor' must be a mapping"),
        (["--engines", "zcompile:skip_passes=[[1]]"], "option 'skip_passes' must be a list"),
        (["--engines", "zcompile:gather_budget_bytes=true"], "must be a whole number of bytes, at least 0, not True"),
        (["--engines", "limit:transport=nccl"], "engine 'limit' takes no options"),
        (["--engines", "fsdp2:transport=nccl"], "engine 'fsdp2' takes no option but offload"),
        (["--engines", "eager:bucket_bytes=0"], "engine 'eager' takes no option but transport, offload"),
        (["--engines", "zcompile:offload=all"], "offload is moments or states, not 'all'"),
        (["--model", "no/such model"], "no model 'no/such model': built in are tiny"),
        (["--model", "3B"], "no model of size '3B': built in are tiny"),
        (["--module", "missing.py:build"], "there is no file 'missing.py'"),
        (["--module", f"{__file__}:absent"], "has no function 'absent'"),
        (["--ranks", "0"], "must be at least 1"),
        (["--steps", "many"], "invalid"),
        (["--untraced", "--trace"], "--untraced leaves nothing"),
        (["--model", "7b", "--ranks", "1"], "take more ranks or a smaller model"),
        (["--module", f"{__file__}:build", "--checkpointing"], "--checkpointing has no meaning"),
        (["--module", f"{__file__}:build", "--batch", "4"], "--batch and --tokens have no meaning"),
        (["--module", "Makefile:build"], "is none"),
        (["--model", "FOLDER/t5"], "is no causal language model"),
        (["--model", "FOLDER/llama", "--tokens", "65"], "--tokens 65 is more than the 64 positions"),
    ],
)
def test_bad_input_is_one_line(arguments, says, capsys, tmp_path, configs):
    arguments = [argument.replace("FOLDER", str(configs)) for argument in arguments]
    with pytest.raises(SystemExit) as stopped:
        main(["profile", *arguments, "--output", str(tmp_path)])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and says in printed and printed.count("\n") == 1
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize(
    "batch, tokens",
    [
        ("torch.randint(9, (2, 8), generator=torch.Generator())", 16),
        ("{'input_ids': torch.zeros(3, 5, dtype=torch.int32), 'pixels': torch.zeros(4)}", 15),
        ("torch.zeros(2, 8)", None),
        ("{'pixels': torch.zeros(4)}", None),
        ("(torch.zeros(2, 8, dtype=torch.int64),)", None),
    ],
)
def test_tokens_of_a_users_batch_are_counted(batch, tokens, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(f"import torch\ndef build(): return torch.nn.Linear(2, 2), lambda step, rank: {batch}, None\n")
    with torch.device("meta"):  # as a GPU is the default where a model is made
        assert load("tiny", f"{file}:build", None, None, False).tokens == tokens


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
