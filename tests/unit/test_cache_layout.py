"""Where cached shards lie, over random sizes."""

import random

import pytest

from zcompile import _C

PAGE = 2 << 20
LARGE = 4 << 20  # bytes, from which on a shard is mapped a second time


def random_shards(generator):
    """(bytes, whether backward gathers it): sizes around a page and around what is large, aligned like an element."""
    sizes = [generator.choice((2, 512, PAGE // 2, LARGE - 2, LARGE, LARGE + 2, 3 * PAGE + 1024)) for _ in range(8)]
    return [(size, generator.random() < 0.7) for size in sizes]


@pytest.mark.parametrize("world", [2, 3, 8])
def test_shards_of_a_rank_lie_apart(world):
    generator = random.Random(world)
    for _ in range(100):
        shards = random_shards(generator)
        places, blocks = _C.lay_out_cache(shards, world)
        assert sorted(shard for shard, *_ in places) == list(range(len(shards)))
        for rank in range(world):
            end = 0
            for shard, offset, end_of_shard, _, _ in places:
                size = shards[shard][0]
                begin = offset - _C.head_bytes(size, rank)
                assert end <= begin and begin + size <= end_of_shard
                end = end_of_shard
            assert end <= sum(blocks)


def test_pages_of_large_shards_are_blocks():
    generator = random.Random(0)
    for world in (2, 5):
        shards = random_shards(generator)
        places, blocks = _C.lay_out_cache(shards, world)
        assert all(size > 0 and size % PAGE == 0 for size in blocks)
        for shard, offset, _, mapped, block in places:
            size = shards[shard][0]
            assert (block is not None) == (size >= LARGE) == (mapped > 0)
            if block is None:
                continue
            assert offset == sum(blocks[:block]) and mapped == blocks[block]
            for rank in range(world):  # the pages lie inside of every rank's piece of the unsharded parameter
                head = _C.head_bytes(size, rank)
                assert (rank * size + head) % PAGE == 0 and head + mapped <= size


def test_what_backward_does_not_gather_lies_at_the_end():
    places, _ = _C.lay_out_cache([(LARGE, False), (512, False), (LARGE, True), (1024, True)], 2)
    assert [shard for shard, *_ in places] == [1, 2, 3, 0]


def test_nothing_takes_no_memory():
    assert _C.lay_out_cache([], 2) == ([], [])
    assert _C.group_for_refresh([]) == []


def test_groups_follow_the_order_small_shards_first():
    sizes = [LARGE, 512, LARGE, LARGE, 1024, LARGE]
    groups = _C.group_for_refresh(sizes)
    assert groups[1] == groups[4] == 0
    large = [groups[i] for i in (0, 2, 3, 5)]
    assert large == sorted(large) and large == [0, 4, 8, 12]
