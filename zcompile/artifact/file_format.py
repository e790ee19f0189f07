"""The file of a compiled model: magic, SHA-256 of all that follows it, length of the header, header (JSON), parts.

[Note: a file is a program]
Loading a file unpickles objects and runs native code, so a file can do anything that a program can. Nothing is
unpickled before four checks pass: only this user, root and the file's group may write the file; its SHA-256 is the one
that the caller gave, if any; its content has the SHA-256 that is in the file; and the fingerprint in its header equals
this process's. The SHA-256 in the file detects damage; only a SHA-256 from the caller detects an attacker.
"""

import hashlib
import json
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"zcompile artifact 5\n"
LENGTH_BYTES = 8  # size of the field with the header's length, little-endian


class ArtifactError(RuntimeError):
    """A model's compiled code cannot be saved in a file, or loaded from one."""


@dataclass(frozen=True)
class Artifact:
    fingerprint: dict[str, str]  # the model, machine and settings that it was made for, see fingerprint.py
    facts: dict[str, Any]  # the other fields of the header: JSON values by name
    parts: dict[str, bytes]  # programs, code and kernels: bytes by name


def encode(fingerprint: Mapping[str, str], facts: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    listed = [[name, len(part)] for name, part in parts.items()]
    header = json.dumps({"fingerprint": dict(fingerprint), "facts": dict(facts), "parts": listed}).encode()
    body = b"".join([len(header).to_bytes(LENGTH_BYTES, "little"), header, *parts.values()])
    return MAGIC + hashlib.sha256(body).digest() + body


def decode(data: bytes, name: str) -> Artifact:
    """Parse the bytes of an artifact, without unpickling anything. Errors call the file `name`.

    Raises ArtifactError if `data` is not an artifact of this version, or is damaged.
    """
    if not data.startswith(MAGIC):
        raise ArtifactError(f"zcompile: {name} is not an artifact of this version of zcompile. Delete it, and rerun.")
    start = len(MAGIC) + hashlib.sha256().digest_size
    body = memoryview(data)[start:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise ArtifactError(f"zcompile: {name} is damaged: its bytes do not match its checksum. Delete it, and rerun.")
    at = LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little")
    header = json.loads(bytes(body[LENGTH_BYTES:at]))
    parts = {}
    for part, nbytes in header["parts"]:
        parts[part] = bytes(body[at : at + nbytes])
        at += nbytes
    return Artifact(header["fingerprint"], header["facts"], parts)


def read(path: Path, sha256: str | None = None) -> bytes:
    """Return the bytes of the file at `path`, if only this user, root and the file's group may write it.

    Args:
        sha256: the SHA-256 that the file must have, as hexadecimal digits.

    Raises:
        FileNotFoundError: there is no such file.
        ArtifactError: other users may write or replace the file, its SHA-256 is not `sha256`, or a read failed.
    """
    try:
        with path.open("rb") as file:
            check_writers(path, os.fstat(file.fileno()))
            data = file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ArtifactError(f"zcompile: {path} cannot be read: {error}.") from None
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and found != sha256.lower():
        raise ArtifactError(f"zcompile: {path} has the SHA-256 {found}, not {sha256} (sha256=): use the right file.")
    return data


def check_writers(path: Path, status: os.stat_result) -> None:
    """Raise ArtifactError if other users may write or replace `path`, a file or folder; warn if its group may."""
    problem, folder = "", path.parent.stat().st_mode
    if status.st_uid not in (os.geteuid(), 0):
        problem, remedy = f"it belongs to the user with ID {status.st_uid}", "If you trust it, load a copy of your own."
    elif folder & stat.S_IWOTH and not folder & stat.S_ISVTX:
        problem = "every user of this machine may replace files in its folder"
        remedy = f"Move it, or `chmod o-w {path.parent}`."
    elif status.st_mode & stat.S_IWOTH:
        problem = "every user of this machine may write it"
        remedy = f"Make it anew, or `chmod o-w {path}` if you trust it."
    if problem:
        raise ArtifactError(f"zcompile: {path} is refused: {problem}, and zcompile runs code from it. {remedy}")
    if status.st_mode & stat.S_IWGRP:
        warnings.warn(
            f"zcompile: the group of {path} may write it, and loading it runs its code: `chmod g-w {path}`, or "
            "pin its SHA-256 (sha256=).",
            stacklevel=2,
        )
