"""The file of a compiled model: what is written is read, and nothing else is."""

import hashlib
import json
import os
import random
import stat

import pytest
import torch

import zcompile
from tests.support.fake_ranks import as_rank
from zcompile.artifact.file_format import LENGTH_BYTES, MAGIC, ArtifactError, decode, encode, read, write

FINGERPRINT, FACTS = {"torch": "2.13", "mesh": "[2]"}, {"plan": ["a", 1]}
PARTS = {"program": b"\x00pickle" * 9, "native/a": b"", "native/b": b"elf"}
DATA = encode(FINGERPRINT, FACTS, PARTS)


def test_what_was_written_is_read(tmp_path):
    write(tmp_path / "folder" / "model.zc", DATA)
    data = read(tmp_path / "folder" / "model.zc")
    artifact = decode(data, "model.zc")
    assert (artifact.fingerprint, artifact.facts, artifact.parts) == (FINGERPRINT, FACTS, PARTS)


def test_the_layout_is_magic_length_header_parts():
    length = int.from_bytes(DATA[len(MAGIC) : len(MAGIC) + LENGTH_BYTES], "little")
    header = json.loads(DATA[len(MAGIC) + LENGTH_BYTES :][:length])
    assert header["fingerprint"] == FINGERPRINT
    assert [name for name, _, _ in header["parts"]] == list(PARTS)
    assert DATA.endswith(b"".join(PARTS.values()))


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04N.", b"zcompile artifact 9\n" + DATA[len(MAGIC) :], b"PK\x03\x04" * 99]
)
def test_foreign_bytes_are_refused(data):
    with pytest.raises(ArtifactError, match=r"model\.zc is not an artifact"):
        decode(data, "model.zc")


def test_no_truncated_file_is_read():
    for length in range(len(MAGIC), len(DATA)):
        with pytest.raises(ArtifactError, match=r"model\.zc is damaged"):
            decode(DATA[:length], "model.zc")


def test_no_flipped_bit_of_a_part_goes_unseen():
    generator = random.Random(0)
    for _ in range(50):
        damaged = bytearray(DATA)
        damaged[-1 - generator.randrange(sum(map(len, PARTS.values())))] ^= 1 << generator.randrange(8)
        with pytest.raises(ArtifactError, match=r"part '(program|native/b)' has another checksum"):
            decode(bytes(damaged), "model.zc")


def test_a_header_of_another_shape_is_refused():
    for header in (b"[]", b"{}", b'{"fingerprint": {}, "facts": {}, "parts": [["a", "x", "y"]]}', b"{", b"\xff"):
        with pytest.raises(ArtifactError, match="its header cannot be read"):
            decode(MAGIC + len(header).to_bytes(LENGTH_BYTES, "little") + header, "model.zc")


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


def test_a_file_that_everybody_may_write_is_refused(tmp_path):
    write(tmp_path / "model.zc", DATA)
    os.chmod(tmp_path / "model.zc", 0o646)
    with pytest.raises(ArtifactError, match="every user of this machine may write it"):
        read(tmp_path / "model.zc")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(tmp_path):
    write(tmp_path / "model.zc", DATA)
    os.chown(tmp_path / "model.zc", 12345, -1)
    with pytest.raises(ArtifactError, match="belongs to the user of number 12345"):
        read(tmp_path / "model.zc")


def test_a_folder_in_which_everybody_may_replace_files_is_refused(tmp_path):
    write(tmp_path / "model.zc", DATA)
    os.chmod(tmp_path, 0o777)
    with pytest.raises(ArtifactError, match="every user of this machine may replace files in its folder"):
        read(tmp_path / "model.zc")
    os.chmod(tmp_path, 0o1777)  # as of /tmp
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


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write(tmp_path / "model.zc", DATA)

    def fail(descriptor):
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "model.zc", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["model.zc"]
    assert read(tmp_path / "model.zc") == DATA


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1"])
def test_a_torch_that_cannot_save_refuses_in_one_sentence(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with as_rank(0, 2):
        model = zcompile.shard(torch.nn.Linear(4, 4))
        with pytest.raises(ValueError, match="cannot save compiled models; that needs torch 2") as refused:
            zcompile.compile(model, artifact="model.zc")
    assert "\n" not in str(refused.value) and model._compiled_call_impl is None
