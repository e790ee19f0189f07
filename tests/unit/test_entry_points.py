"""What a user meets first: the backend's name, and a model before any process group."""

import subprocess
import sys

import pytest
from torch import nn

import zcompile


def test_sharding_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        zcompile.shard(nn.Linear(2, 2))


def test_backend_is_found_without_an_import():
    code = "import torch; assert 'zcompile' in torch._dynamo.list_backends(), torch._dynamo.list_backends()"
    subprocess.run([sys.executable, "-c", code], check=True)
