"""Which flat elements each rank owns, compared with plain Python that deals out the elements."""

import random

import pytest

from zcompile import _C

SIZES = [random.Random(seed).randint(1, 2000) for seed in range(20)]


def dealt_out(numel, world):
    """What each rank owns if a list of all elements is cut into pieces of equal size, the last ones shorter."""
    elements = list(range(numel))
    chunk = next(size for size in range(numel + 1) if size * world >= numel)
    return chunk, [elements[rank * chunk : (rank + 1) * chunk] for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 64])
def test_ranks_own_what_a_cut_list_gives_them(world):
    for numel in [0, 1, 2, world - 1, world, world + 1, 5 * world, 5 * world + 1, *SIZES]:
        chunk, pieces = dealt_out(numel, world)
        layout = _C.ShardLayout(numel, chunk)
        for rank, piece in enumerate(pieces):
            assert layout.length_of(rank) == len(piece)
            assert list(range(numel))[layout.offset_of(rank) :][: layout.length_of(rank)] == piece


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_padded_size_is_that_of_equal_pieces(world):
    for numel in SIZES:
        chunk, pieces = dealt_out(numel, world)
        assert _C.ShardLayout(numel, chunk).padded_numel(world) == world * max(len(piece) for piece in pieces)


def test_a_replicated_parameter_belongs_to_every_rank():
    layout = _C.ShardLayout(1, 1, replicated=True)
    assert [(layout.offset_of(rank), layout.length_of(rank)) for rank in range(4)] == [(0, 1)] * 4
    assert layout.padded_numel(4) == 1


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_packed_pieces_hold_their_elements_and_begin_where_every_dtype_can(element_bytes):
    for length in [0, 1, 7, 8, 16, *SIZES]:
        packed = _C.packed_bytes(length, element_bytes)
        assert packed % 16 == 0 and packed > 0
        assert length * element_bytes <= packed < max(length, 1) * element_bytes + 16
