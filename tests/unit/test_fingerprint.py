"""Each thing that compiled code depends on is a field of the fingerprint: if it differs, that field is named."""

import contextlib
import dataclasses
import platform
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import zcompile
from tests.support import artifacts
from tests.support.artifacts import Mixed, during, sharded, tokens_of
from tests.support.meshes import as_rank
from zcompile.artifact import fingerprint as module
from zcompile.artifact.fingerprint import differences, fingerprint
from zcompile.artifact.kernels import names_device_number
from zcompile.options import Settings

BASE = Settings()
patch = mock.patch.object


def taken(make_model=Mixed, world=2, settings=BASE, mode=None, memory=1 << 33, args=None, kwargs=None, **how):
    """The fingerprint of a model. `change` edits it, or returns a context in which the fingerprint is taken."""
    change = how.pop("change", lambda model: None)
    with as_rank(0, world):
        model = sharded(make_model, **how)
        args = (tokens_of(0, 0),) if args is None else args
        changed = change(model)
        with changed if hasattr(changed, "__exit__") else contextlib.nullcontext():
            return fingerprint(model, settings, mode, memory, args, kwargs or {})


@pytest.fixture(scope="module")
def base():
    return taken()


def test_the_same_is_the_same_and_values_of_tensors_play_no_part(base):
    assert differences(base, taken()) == differences(base, taken(args=(tokens_of(9, 1),))) == []


def made_with(**changed):
    """Makes a `Mixed` with these attributes, before it is sharded."""

    def make():
        model = Mixed()
        for name, value in changed.items():
            setattr(model, name, value)
        return model

    return make


def edited_forward(model):
    model.down.__class__ = type("Linear", (type(model.down),), {"forward": lambda self, x: 2 * x})


TOKENS = tokens_of(0, 0)
CASES = {
    "torch": {"change": lambda model: patch(torch, "__version__", "2.99")},
    "python": {"change": lambda model: patch(platform, "python_version", lambda: "3.99.0")},
    "zcompile": {"change": lambda model: patch(module, "cache_key", lambda: "edited")},
    "cuda": {"change": lambda model: patch(torch.version, "cuda", "99.0")},
    "triton": {"change": lambda model: patch(module, "_triton_version", lambda: "99.0")},
    "device": {"change": lambda model: patch(module, "_processor_flags", lambda: "other")},
    "threads": {"change": lambda model: patch(torch, "get_num_threads", lambda: 77)},
    "mode": {"mode": "max-autotune-no-cudagraphs"},
    "inductor": {"settings": dataclasses.replace(BASE, inductor={"size_asserts": False})},
    "torch._inductor.config.epilogue_fusion": {
        "change": lambda model: torch._inductor.config.patch(epilogue_fusion=False)
    },
    "torch._dynamo.config.assume_static_by_default": {
        "change": lambda model: torch._dynamo.config.patch(assume_static_by_default=False)
    },
    "shard": {"reduce_dtype": torch.bfloat16},
    "modules": {"change": edited_forward},
    "parameters": {"change": lambda model: model.down.weight.requires_grad_(False)},
    "hooks": {"change": lambda model: model.down.register_forward_hook(lambda *args: None)},
    "training": {"change": lambda model: model.drop.eval()},
    "autocast": {"change": lambda model: torch.autocast("cpu", torch.bfloat16)},
    "gradients": {"change": lambda model: torch.no_grad()},
    "determinism": {"change": lambda model: during(torch.use_deterministic_algorithms, True, False)},
    "precision": {"change": lambda model: during(torch.set_float32_matmul_precision, "medium", "highest")},
    "default dtype": {"change": lambda model: during(torch.set_default_dtype, torch.float64, torch.float32)},
    "buffers": {"make_model": made_with(offset=torch.arange(6.0, dtype=torch.float64))},
}

ALSO = {"determinism": {"torch._inductor.config.deterministic"}}  # what follows from it


@pytest.mark.parametrize("field", CASES)
def test_a_difference_is_named_by_its_field_alone(base, field):
    lines = differences(base, taken(**CASES[field]))
    named = [line.partition(":")[0] for line in lines]
    assert set(named) == {field, *ALSO.get(field, ())}, lines


@pytest.mark.parametrize(
    "field, how",
    [
        ("mesh", {"world": 4}),
        ("plan", {"memory": 1 << 30}),
        ("settings", {"settings": dataclasses.replace(BASE, bucket_bytes=0)}),
        ("modules", {"param_dtype": torch.bfloat16}),
        ("parameters", {"make_model": made_with(shift=nn.Parameter(torch.ones(6)))}),
        ("parameters", {"make_model": made_with(shift=nn.Parameter(torch.ones(1, dtype=torch.bfloat16)))}),
        ("ties", {"make_model": made_with(head=nn.Linear(6, artifacts.VOCABULARY, bias=False))}),
    ],
)
def test_a_difference_is_among_those_named(base, field, how):
    assert field in {line.partition(":")[0] for line in differences(base, taken(**how))}


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((tokens_of(0, 0, length=5),), {}),
        ((TOKENS.int(),), {}),
        ((TOKENS.t().contiguous().t(),), {}),
        ((), {"tokens": TOKENS}),
        ((TOKENS, 1), {}),
        ((TOKENS, 2), {}),
        ((TOKENS, "text"), {}),
    ],
)
def test_other_inputs_are_named(base, args, kwargs):
    (line,) = differences(base, taken(args=args, kwargs=kwargs))
    assert line.startswith("inputs: made for Tensor [2, 4] stride [4, 1] torch.int64 cpu requires_grad=False")


def test_an_open_size_is_any_number_and_nothing_else():
    tokens = tokens_of(0, 0)
    torch._dynamo.maybe_mark_dynamic(tokens, 1)
    made = taken(args=(tokens,))
    for others, differs in ((tokens_of(0, 0, length=17), False), (TOKENS[:1], True), (TOKENS.int(), True)):
        assert [line[:6] for line in differences(made, taken(args=(others,)))] == ["inputs"] * differs


def test_an_ignored_parameter_is_named(base):
    with as_rank(0, 2):
        torch.manual_seed(0)
        model = Mixed()
        zcompile.shard(model, ignored_params=[model.shift])
        found = fingerprint(model, BASE, None, 1 << 33, (TOKENS,), {})
    named = {line.partition(":")[0] for line in differences(base, found)}
    assert {"unsharded parameters", "parameters"} <= named


def test_a_field_that_only_one_side_has_is_named():
    assert differences({"a": "1"}, {"b": "2"}) == ["a: made for 1; here nothing", "b: made for nothing; here 2"]


def test_every_field_has_a_test_that_a_change_of_it_is_named(base):
    others = {"mesh", "plan", "settings", "ties", "unsharded parameters", "inputs"}  # tested below the list
    assert {name for name in base if "torch._" not in name} == {name for name in CASES if "_" not in name} | others


@pytest.mark.parametrize(
    "name, value", [("get_device_name", "B200"), ("get_device_capability", 9), ("current_device", 5)]
)
def test_another_gpu_is_named_and_another_number_of_it_only_for_code_that_has_it(name, value):
    def taken(**values):
        gpu = {"get_device_name": "H100", "get_device_capability": 8, "current_device": 0} | values
        with mock.patch.multiple(torch.cuda, **{name: lambda value=value: (value, 0) for name, value in gpu.items()}):
            return module.machine("cuda")

    made, here, field = taken(), taken(**{name: value}), module.NUMBER if name == "current_device" else "device"
    (line,) = differences(made, here)
    assert line.startswith(f"{field}: made for ")
    del made[module.NUMBER]
    assert bool(differences(made, here)) == (field == "device")


@pytest.mark.parametrize("line", ["_DeviceGuard(0)", "get_raw_stream(3)", "device='cuda:1'", "type='cuda', index=2,"])
def test_code_that_names_a_gpu_by_its_number_is_found(line):
    def entry(code):
        return SimpleNamespace(compiled_fw=SimpleNamespace(result=SimpleNamespace(source_code=code)), compiled_bw=None)

    assert names_device_number(entry(f"with torch.cuda.{line}:"))
    assert not names_device_number(entry("empty_strided_cuda((4, 2), (2, 1)); get_raw_stream(current); device='cuda'"))


def test_code_is_told_apart_by_what_it_does_and_not_by_where_it_stands():
    one, other = (eval(f"{chr(10) * lines}lambda x: [y + {number} for y in x]") for lines, number in ((0, 1), (3, 1)))
    third = eval("lambda x: [y + 2 for y in x]")
    assert module.code_hash(one) == module.code_hash(other) != module.code_hash(third)
