"""The file of a compiled model: what is written is read, and nothing else is; and names of groups in its code."""

import hashlib
import os
import pickle
import random
import stat

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import zcompile
from tests.support.artifacts import cache_in
from tests.support.meshes import as_rank
from tests.support.process import full_disk
from zcompile.artifact.file_format import MAGIC, ArtifactError, decode, encode, read
from zcompile.artifact.groups import with_names, with_places
from zcompile.artifact.kernels import install_kernels
from zcompile.artifact.program import asks_for_rank
from zcompile.whole_files import write

FINGERPRINT, FACTS = {"torch": "2.13", "mesh": "[2]"}, {"plan": ["a", 1]}
PARTS = {"program": b"\x00pickle" * 9, "native/a": b"", "native/b": b"elf"}
DATA = encode(FINGERPRINT, FACTS, PARTS)


def test_what_was_written_is_read(tmp_path):
    write(tmp_path / "folder" / "model.zc", DATA)
    data = read(tmp_path / "folder" / "model.zc")
    artifact = decode(data, "model.zc")
    assert (artifact.fingerprint, artifact.facts, artifact.parts) == (FINGERPRINT, FACTS, PARTS)


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04N.", b"zcompile artifact 9\n" + DATA[len(MAGIC) :], b"PK\x03\x04" * 99]
)
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
        pytest.param(lambda path: os.chown(path, 12345, -1), "to the user of number 12345", marks=only_root),
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
    refused = pytest.raises(ArtifactError, match=r"open is refused: .* set TORCHINDUCTOR_CACHE_DIR to a folder of your")
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
    flipped = [
        data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in chosen.sample(range(len(data)), 15)
    ]
    cut = [data[:at] for at in chosen.sample(range(len(data)), 5)]
    with as_rank(0, 2):
        model = zcompile.shard(torch.nn.Linear(4, 4))
        for damaged in [*flipped, *cut, pickle.dumps(Unpickled())]:
            write(path, damaged)
            zcompile.compile(model, artifact=path, require=True, sha256=pin)
            with pytest.raises(RuntimeError, match=r"model\.zc (is damaged|is not an artifact|has the SHA-256)"):
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
    with pytest.raises(RuntimeError, match="over process group '5', of no mesh"):
        with_places(CODE, {"3": "mesh 0"})


def test_functions_that_ask_for_the_rank_are_found():
    assert not asks_for_rank([("torch.distributed.distributed_c10d", 1, 4000, "")])
    assert "get_local_rank()" in asks_for_rank([("transformers.distributed.expert_parallel", 1, 300, "")])
