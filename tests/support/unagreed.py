"""CPU ranks that do not agree before each collective, as ranks over NCCL do not."""

import pytest

import zcompile
from zcompile.ranks import order_watch, process_groups


def patch_agreement(monkeypatch, period_s):
    """Models sharded from now on do without. The thread that compares their ranks does so once in `period_s`."""
    monkeypatch.setattr(process_groups, "ranks_agree", lambda mesh: False)
    monkeypatch.setattr(order_watch, "PERIOD_S", period_s)


def shard_without_agreement(model, mesh, period_s):
    """`model`, sharded as over NCCL."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch_agreement(monkeypatch, period_s)
        return zcompile.shard(model, mesh)
