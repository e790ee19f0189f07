"""Which parameters are gathered again, against the best that any choice could do."""

import functools
import random

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from zcompile.passes.regather import regather_points


def fewest_misses(reads, capacity):
    """By trying everything: a cache of `capacity` that must hold each of `reads` when it is read."""

    @functools.cache
    def misses(i, held):
        if i == len(reads):
            return 0
        if reads[i] in held:
            return misses(i + 1, held)
        if len(held) < capacity:
            return 1 + misses(i + 1, held | {reads[i]})
        return 1 + min(misses(i + 1, held - {evicted} | {reads[i]}) for evicted in held)

    return misses(0, frozenset())


def test_parameters_are_gathered_again_as_seldom_as_can_be():
    drawn = random.Random(0)
    for _ in range(200):
        count, capacity = drawn.randint(2, 5), drawn.randint(1, 4)
        sequence = [drawn.randrange(count) for _ in range(drawn.randint(count, 14))]
        graph, mode = Graph(), FakeTensorMode()
        gathers = [graph.placeholder(f"p{number}") for number in range(count)]
        places = {}
        for number, gather in enumerate(gathers):
            gather.meta["val"] = mode.from_tensor(torch.empty(1))
            reads = [place for place, read in enumerate(sequence) if read == number]
            if reads:
                places[gather] = reads
        again = regather_points(places, capacity * 4, last=len(sequence))
        assert len(places) + sum(map(len, again.values())) == fewest_misses(tuple(sequence), capacity)
