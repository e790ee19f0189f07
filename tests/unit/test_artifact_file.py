"""The file of a compiled model: only a whole file of its own kind is read, and its fingerprint names differences."""

import contextlib
import dataclasses
import hashlib
import os
import pickle
import platform
import random
import stat
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

import zcompile
from tests.support import artifacts
from tests.support.artifacts import Mixed, cache_in, during, sharded, tokens_of
from tests.support.meshes import as_rank
from tests.support.process import full_disk
from zcompile.artifact import fingerprint as module
from zcompile.artifact.file_format import MAGIC, ArtifactError, decode, encode, read
from zcompile.artifact.fingerprint import differences, fingerprint
from zcompile.artifact.groups import with_names, with_places
from zcompile.artifact.kernels import install_kernels, names_device_number
from zcompile.artifact.program import asks_for_rank
from zcompile.options import Settings
from zcompile.whole_files import write

FINGERPRINT, FACTS = {"torch": "2.13", "mesh": "[2]"}, {"plan": ["a", 1]}
PARTS = {"program": b"\x00pickle" * 9, "native/a": b"", "native/b": b"elf"}
DATA = encode(FINGERPRINT, FACTS, PARTS)


def test_what_was_written_is_read(tmp_path):
    write(tmp_path / "folder" / "model.zc", DATA)
    data = read(tmp_path / "folder" / "model.zc")
    artifact = decode(data, "model.zc")
    assert (artifact.fingerprint, artifact.facts, artifact.parts) == (FINGERPRINT, FACTS, PARTS)


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"zcompile artifact 9\n" + DATA[len(MAGIC) :], b"PK\x03\x04" * 9])
def test_foreign_bytes_are_refused(data):
    with pytest.raises(ArtifactError, match=r"model\.zc is not an artifact"):
        decode(data, "model.zc")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)), st.binary(max_size=12))
@example(0, 0, b"x").via("bytes in front")
@example(len(DATA), len(DATA), b"x").via("bytes behind")
def test_bytes_that_are_cut_or_exchanged_anywhere_are_refused(begin, length, between):
    damaged = DATA[:begin] + between + DATA[begin + length :]
    assume(damaged != DATA)
    with pytest.raises(ArtifactError, match=r"model\.zc is (damaged|not an artifact)"):
        decode(damaged, "model.zc")


def test_a_missing_file_is_told_from_a_bad_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "model.zc")
    with pytest.raises(ArtifactError, match="cannot be read"):
        read(tmp_path)


def test_a_pinned_sha256_is_checked(tmp_path):
    write(tmp_path / "model.zc", DATA)
    assert read(tmp_path / "model.zc", hashlib.sha256(DATA).hexdigest().upper()) == DATA
    with pytest.raises(ArtifactError, match=r"has the SHA-256 .* not abc"):
        read(tmp_path / "model.zc", "abc")


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda path: path.chmod(0o646), "every user of this machine may write it"),
        (lambda path: path.parent.chmod(0o777), "every user of this machine may replace files in its folder"),
        pytest.param(lambda path: os.chown(path, 12345, -1), "to the user with ID 12345", marks=only_root),
    ],
)
def test_a_file_that_another_user_may_have_written_is_refused(tmp_path, edit, message):
    write(tmp_path / "model.zc", DATA)
    edit(tmp_path / "model.zc")
    with pytest.raises(ArtifactError, match=message):
        read(tmp_path / "model.zc")


def test_a_file_in_a_folder_like_tmp_is_read(tmp_path):
    write(tmp_path / "model.zc", DATA)
    tmp_path.chmod(0o1777)
    assert read(tmp_path / "model.zc") == DATA


def test_a_file_that_its_group_may_write_is_warned_of(tmp_path):
    write(tmp_path / "model.zc", DATA)
    os.chmod(tmp_path / "model.zc", 0o664)
    with pytest.warns(UserWarning, match="chmod g-w"):
        assert read(tmp_path / "model.zc") == DATA


@pytest.mark.parametrize("umask, mode", [(0, 0o644), (0o077, 0o600)])
def test_a_written_file_is_its_owners_alone_and_leaves_no_other(tmp_path, umask, mode):
    old = os.umask(umask)
    try:
        write(tmp_path / "model.zc", b"earlier")
        write(tmp_path / "model.zc", DATA)
    finally:
        os.umask(old)
    assert [path.name for path in tmp_path.iterdir()] == ["model.zc"]
    assert stat.S_IMODE((tmp_path / "model.zc").stat().st_mode) == mode


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, failing):
    write(tmp_path / "model.zc", DATA)

    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "model.zc", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["model.zc"]
    assert read(tmp_path / "model.zc") == DATA


def test_libraries_are_loaded_from_a_folder_that_others_cannot_write(tmp_path):
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    refused = pytest.raises(ArtifactError, match=r"open is refused: .* set TORCHINDUCTOR_CACHE_DIR to a cache folder")
    with cache_in(tmp_path / "open"), refused:
        install_kernels({"folder": b"elf"})
    with cache_in(tmp_path / "own"):
        install_kernels({"folder": b"elf"})
        assert stat.S_IMODE((tmp_path / "own" / "zcompile").stat().st_mode) == 0o700


def test_an_exchanged_library_is_written_again(tmp_path):
    with cache_in(tmp_path):
        install_kernels({"first": b"elf"})
        (library,) = (tmp_path / "zcompile").iterdir()
        library.write_bytes(b"another")
        install_kernels({"second": b"elf"})
        assert library.read_bytes() == b"elf"


def test_a_full_disk_leaves_no_part_of_a_library(tmp_path):
    with cache_in(tmp_path):
        with full_disk(10), pytest.raises(OSError, match="File too large"):
            install_kernels({"full": b"elf" * 100})
        assert not list((tmp_path / "zcompile").iterdir())
        install_kernels({"full": b"elf" * 100})


class Unpickled:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize("pinned", [False, True])
def test_nothing_is_unpickled_before_the_checksums_hold(tmp_path, pinned):
    path, data = tmp_path / "model.zc", encode(FINGERPRINT, FACTS, dict.fromkeys(PARTS, pickle.dumps(Unpickled())))
    pin = hashlib.sha256(data).hexdigest() if pinned else None
    chosen = random.Random(0)
    flipped = [data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :] for i in chosen.sample(range(len(data)), 15)]
    cut = [data[:at] for at in chosen.sample(range(len(data)), 5)]
    with as_rank(0, 2):
        model = zcompile.shard(torch.nn.Linear(4, 4))
        for damaged in [*flipped, *cut, pickle.dumps(Unpickled())]:
            write(path, damaged)
            zcompile.compile(model, artifact=path, require=True, sha256=pin)
            told = "has the SHA-256" if pinned else "(is damaged|is not an artifact)"
            with pytest.raises(RuntimeError, match=rf"model\.zc {told}"):
                model(torch.ones(1, 4))


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1"])
def test_a_torch_that_cannot_save_refuses_in_one_sentence(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with as_rank(0, 2):
        model = zcompile.shard(torch.nn.Linear(4, 4))
        with pytest.raises(ValueError, match="cannot save compiled models; that needs torch 2") as refused:
            zcompile.compile(model, artifact="model.zc")
    assert "\n" not in str(refused.value) and model._compiled_call_impl is None


CODE = """\
buf1 = torch.ops._c10d_functional.all_to_all_single.default(buf0, [24, 24], [24, 24], '3')
torch.ops._c10d_functional.wait_tensor.default(buf1)
buf2 = torch.ops._c10d_functional.all_reduce.default(buf1, 'sum', '5'); name = '3'
"""


def test_a_rank_that_loads_code_puts_in_the_names_of_its_groups():
    saved = with_places(CODE, {"3": "mesh 0", "5": "mesh 10"})
    loaded = with_names(saved, {"7": "mesh 0", "5": "mesh 10"})
    assert loaded == CODE.replace("24], '3'", "24], '7'")  # and not where it is no group


def test_collectives_over_unknown_groups_are_refused():
    with pytest.raises(RuntimeError, match="over group '5', and no parameter's mesh has this group"):
        with_places(CODE, {"3": "mesh 0"})


def test_functions_that_ask_for_the_rank_are_found():
    assert not asks_for_rank([("torch.distributed.distributed_c10d", 1, 4000, "")])
    assert "get_local_rank()" in asks_for_rank([("transformers.distributed.expert_parallel", 1, 300, "")])


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


edited = lambda kind: type("Linear", (kind,), {"forward": lambda self, x: 2 * x})
TOKENS = tokens_of(0, 0)
INPUTS = [((), {"tokens": TOKENS}), ((TOKENS, 1), {}), ((TOKENS, 2), {}), ((TOKENS, "text"), {})]
INPUTS += [((other,), {}) for other in (tokens_of(0, 0, length=5), TOKENS.int(), TOKENS.t().contiguous().t())]
dynamo, inductor = torch._dynamo.config, torch._inductor.config
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
    "torch._inductor.config.epilogue_fusion": {"change": lambda model: inductor.patch(epilogue_fusion=False)},
    "torch._dynamo.config.assume_static_by_default": {"change": lambda _: dynamo.patch(assume_static_by_default=False)},
    "shard": {"reduce_dtype": torch.bfloat16},
    "modules": {"change": lambda model: setattr(model.down, "__class__", edited(type(model.down)))},
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


@pytest.mark.parametrize("args, kwargs", INPUTS)
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


@pytest.mark.parametrize("name, to", [("get_device_name", "B200"), ("get_device_capability", 9), ("current_device", 5)])
def test_another_gpu_is_named_and_another_number_of_it_only_for_code_that_has_it(name, to):
    def taken(**values):
        gpu = {"get_device_name": "H100", "get_device_capability": 8, "current_device": 0} | values
        with mock.patch.multiple(torch.cuda, **{name: lambda value=value: (value, 0) for name, value in gpu.items()}):
            return module.machine("cuda")

    made, here, field = taken(), taken(**{name: to}), module.NUMBER if name == "current_device" else "device"
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
