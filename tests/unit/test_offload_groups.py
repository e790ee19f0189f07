"""How a step with offloaded moments takes parameters in groups."""

from hypothesis import given
from hypothesis import strategies as st

from zcompile.training.streamed_groups import ALIGNMENT, GRAIN, plan_groups


@given(st.lists(st.integers(0, 5 * GRAIN), max_size=12), st.integers(1, 3))
def test_groups_have_each_element_once_and_fit(numels, grains):
    capacity = grains * GRAIN
    groups = plan_groups(numels, capacity)
    seen = [0] * len(numels)
    met = set()
    for group in groups:
        end = 0
        for piece in group:
            assert piece.begin == seen[piece.item] and piece.begin % GRAIN == 0, "elements in order, cut at the grain"
            assert piece.offset >= end and piece.offset % ALIGNMENT == 0, "pieces overlap in the buffer"
            assert piece.is_whole == (piece.end - piece.begin == numels[piece.item])
            assert piece.is_last == (piece.end == numels[piece.item])
            assert piece.is_whole or numels[piece.item] > capacity, "cut although it fits"
            end = piece.offset + piece.end - piece.begin
            seen[piece.item] = piece.end
            met.add(piece.item)
        assert end <= capacity
    assert seen == numels and met == {*range(len(numels))}


def test_a_rank_without_elements_has_a_group():
    """The transport is called on each rank."""
    assert plan_groups([], GRAIN) == [[]]
    assert [len(group) for group in plan_groups([0, 0], GRAIN)] == [2]


def test_groups_are_filled():
    assert len(plan_groups([GRAIN] * 8, 2 * GRAIN)) == 4
    assert len(plan_groups([8 * GRAIN + 1], 2 * GRAIN)) == 5
