"""Hashes of what decides how graphs are planned: ranks compare one, and Inductor's caches are keyed by the other."""

import functools
import hashlib
from pathlib import Path

from zcompile import _C


@functools.cache
def source_hash() -> str:
    """SHA-256 of all Python files of the package, passes among them. Hosts that built the extension apart share it."""
    root = Path(__file__).parent
    sources = {path.resolve() for folder in (root, root / "passes") for path in folder.rglob("*.py")}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()


@functools.cache
def cache_key() -> str:
    """The same with the extension, whose ops compiled programs call. Hashing it takes about 2 ms."""
    extension = hashlib.sha256(Path(_C.__file__).read_bytes()).hexdigest()
    return f"{source_hash()} {extension}"
