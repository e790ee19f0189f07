"""The extension uses torch's C++ runtime. A second one in the process crashes at the first number in an error."""

from pathlib import Path

from zcompile import _C


def test_the_extension_needs_the_shared_runtime():
    assert b"\0libstdc++.so.6\0" in Path(_C.__file__).read_bytes()
