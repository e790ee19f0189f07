"""The file that holds a compiled model: magic, SHA-256 of all that follows, length of the header, header (JSON), parts.

[Note: a file is a program]
Loading a file unpickles objects and runs native code, so a file can do whatever a program can. Nothing of it is
unpickled before all checks passed: who may write it, its SHA-256 if the caller pins one, the SHA-256 in it, the
fingerprint in its header. The SHA-256 in it finds damage. Only a pinned one finds an attacker.
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

MAGIC = b"zcompile artifact 4\n"
LENGTH_BYTES = 8  # of the header's length, little-endian


class ArtifactError(RuntimeError):
    """A file cannot be loaded. The text names it and says why."""


@dataclass(frozen=True)
class Artifact:
    """A file as it was read."""

    fingerprint: dict[str, str]  # what it was made for, see fingerprint.py
    facts: dict[str, Any]  # what else the header says: JSON values by name
    parts: dict[str, bytes]  # bytes by name


def encode(fingerprint: Mapping[str, str], facts: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """The bytes of a file."""
    listed = [[name, len(part)] for name, part in parts.items()]
    header = json.dumps({"fingerprint": dict(fingerprint), "facts": dict(facts), "parts": listed}).encode()
    body = b"".join([len(header).to_bytes(LENGTH_BYTES, "little"), header, *parts.values()])
    return MAGIC + hashlib.sha256(body).digest() + body


def decode(data: bytes, name: str) -> Artifact:
    """What is in the bytes of a file, which errors call `name`; unpickles nothing.

    Raises:
        ArtifactError: they are no such file, or damaged.
    """
    if not data.startswith(MAGIC):
        raise ArtifactError(f"zcompile: {name} is not an artifact of this version of zcompile.")
    start = len(MAGIC) + hashlib.sha256().digest_size
    body = memoryview(data)[start:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise ArtifactError(f"zcompile: {name} is damaged: it has another checksum than it says. Make it anew.")
    at = LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little")
    header = json.loads(bytes(body[LENGTH_BYTES:at]))
    parts = {}
    for part, nbytes in header["parts"]:
        parts[part] = bytes(body[at : at + nbytes])
        at += nbytes
    return Artifact(header["fingerprint"], header["facts"], parts)


def read(path: Path, sha256: str | None = None) -> bytes:
    """The bytes of the file at `path`, which somebody else may not have written.

    Args:
        sha256: what the file must have, hexadecimal.

    Raises:
        FileNotFoundError: there is none.
        ArtifactError: others than this user, root and its group may write or replace it, it has another SHA-256, or it
            cannot be read.
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
        raise ArtifactError(f"zcompile: {path} has the SHA-256 {found}, not {sha256}, which was asked for.")
    return data


def check_writers(path: Path, status: os.stat_result) -> None:
    """Refuse a file or folder that other users may write or replace, and warn of one that its group may write."""
    problem, folder = "", path.parent.stat().st_mode
    if status.st_uid not in (os.geteuid(), 0):
        problem, remedy = f"it belongs to the user of number {status.st_uid}", "If you trust it, copy it."
    elif folder & stat.S_IWOTH and not folder & stat.S_ISVTX:
        problem = "every user of this machine may replace files in its folder"
        remedy = f"Move it, or `chmod o-w {path.parent}`."
    elif status.st_mode & stat.S_IWOTH:
        problem = "every user of this machine may write it"
        remedy = f"Make it anew, or `chmod o-w {path}` if you trust it."
    if problem:
        raise ArtifactError(f"zcompile: {path} is refused: {problem}, and loading it runs what is in it. {remedy}")
    if status.st_mode & stat.S_IWGRP:
        warnings.warn(
            f"zcompile: the group of {path} may write it, and loading it runs what is in it: `chmod g-w {path}`, or "
            "pin its SHA-256 (sha256=).",
            stacklevel=2,
        )
