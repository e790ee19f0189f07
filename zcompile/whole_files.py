"""Writes files atomically: a reader sees the whole file or none, even if the writing process is killed."""

import contextlib
import os
import secrets
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically. Only the owner may write the file; the umask limits its readers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
