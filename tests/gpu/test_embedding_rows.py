"""Embeddings whose rows travel alone: against whole matrices, and over one transport against the others."""

import pytest

from tests.support.embedding_rows import rank_rows_like_whole, tables_curve
from tests.support.ranks import on_gpus
from tests.support.reference import same_values


@pytest.mark.parametrize("transport", ["p2p", "c10d", "late p2p", "delayed p2p"])
def test_rows_equal_whole_matrices(gpus, transport):
    gpus(2).run(rank_rows_like_whole, transport, "cuda")


@pytest.mark.parametrize("world, microbatches", [(2, 1), (2, 3), (4, 3), (8, 3)])
@on_gpus()
def test_rows_over_transports_agree_bitwise(rank, world, microbatches):
    options = {"device": "cuda", "steps": 5, "microbatches": microbatches}
    over_p2p, *others = (
        tables_curve(rank, {"inner": "inductor"}, transport=transport, **options)
        for transport in ("p2p", "c10d", "delayed p2p")
    )
    for other in others:
        same_values(other, over_p2p)
