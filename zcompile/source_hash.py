"""Hashes of zcompile's code: ranks compare `source_hash`, and keys of Inductor's caches contain `cache_key`."""

import functools
import hashlib
from pathlib import Path

from zcompile import _C


@functools.cache
def source_hash() -> str:
    """Return the SHA-256 of zcompile's Python files: equal on hosts that built the C++ extension separately."""
    root = Path(__file__).parent
    sources = {path.resolve() for folder in (root, root / "passes") for path in folder.rglob("*.py")}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()


@functools.cache
def cache_key() -> str:
    """Return `source_hash` and the SHA-256 of the C++ extension, whose ops compiled code calls. Takes about 2 ms."""
    extension = hashlib.sha256(Path(_C.__file__).read_bytes()).hexdigest()
    return f"{source_hash()} {extension}"
