"""Where gradients lie among cached shards, over random programs of ranks that run the same one."""

import itertools
import random
from dataclasses import dataclass, field

import pytest

from zcompile import _C

RANKS = 3
STEPS = 8


@dataclass
class Rank:
    """One rank's memory: which bytes must stay as they are, and what gradients were put there."""

    placement: _C.GradPlacement
    used: set[int] = field(default_factory=set)  # shards that its own unsharded parameters are composed of
    gradients: list[tuple[int, int]] = field(default_factory=list)  # since the refresh

    def holds(self, begin: int, end: int) -> bool:
        return all(end <= low or high <= begin for low, high in self.gradients)


class Program:
    """Shards, and what a backward does with them: the same in every step, but for gathers that nobody expected."""

    def __init__(self, generator: random.Random):
        self.generator = generator
        sizes = [generator.randrange(1, 9) * 512 for _ in range(generator.randrange(1, 12))]
        ends = list(itertools.accumulate(sizes))
        self.shards = list(zip([0, *ends], ends))
        self.ranks = [Rank(_C.GradPlacement(self.shards, ends[-1])) for _ in range(RANKS)]
        order = sorted(range(len(sizes)), key=lambda shard: -shard + generator.uniform(0, 3))  # about from the end
        self.actions = []
        for time, shard in enumerate(order):
            gathered = generator.random() < 0.8  # others stay unsharded from forward
            self.actions += [(time, "gather", shard), (time + generator.uniform(0, 2), "wait", shard)] * gathered
            self.actions.append((time + generator.uniform(1, 4), "reduce", shard))
        self.actions.sort(key=lambda action: action[0])
        self.placed_bytes: list[int] = []  # of rank 0, in each step

    def step(self, surprises: bool) -> None:
        for rank in self.ranks:
            rank.placement.refresh()
            rank.gradients.clear()
            assert not any(map(rank.placement.is_dead, range(len(self.shards))))
        in_flight: dict[int, bool] = {}  # shard -> whether it comes from here
        unexpected: list[tuple[int, bool]] = []
        readers: list[tuple[float, Rank, int]] = []  # until when a rank reads a shard where it is
        for time, what, shard in self.actions:
            readers = [each for each in readers if each[0] > time or each[1].used.discard(each[2])]
            if what == "gather":
                in_flight[shard] = self.gather(shard)
                for rank in self.ranks if in_flight[shard] else ():
                    rank.used.add(shard)
            elif what == "wait":
                self.finish(shard, in_flight[shard])
                readers += [
                    (time + self.generator.choice((0, 1, 2.5)), rank, shard)
                    for rank in self.ranks
                    if shard in rank.used
                ]
            else:
                self.reduce(shard)
            if unexpected and self.generator.random() < 0.7:
                self.finish(*unexpected.pop())
            if surprises and self.generator.random() < 0.3:
                surprise = self.generator.randrange(len(self.shards))
                unexpected.append((surprise, self.gather(surprise)))
        for gathered in unexpected:
            self.finish(*gathered)
        for rank in self.ranks:
            rank.placement.finish_backward(is_caching=False)
            rank.used.clear()
        assert len({rank.placement.learned() for rank in self.ranks}) == 1
        self.placed_bytes.append(sum(end - begin for begin, end in self.ranks[0].gradients))

    def gather(self, shard: int) -> bool:
        dead = {rank.placement.is_dead(shard) for rank in self.ranks}
        assert len(dead) == 1, "some ranks would wait for others in a collective"
        for rank in self.ranks:
            rank.placement.gather_elsewhere(shard) if dead == {True} else rank.placement.start_gather(shard)
        return dead == {False}

    def finish(self, shard: int, from_here: bool) -> None:
        for rank in self.ranks if from_here else ():
            assert rank.holds(*self.shards[shard]), "a gradient lies where a peer has just read a shard"
            rank.placement.finish_gather(shard, in_backward=True)

    def reduce(self, shard: int) -> None:
        begin, end = self.shards[shard]
        for rank in self.ranks:
            offset = rank.placement.place(2 * (end - begin), rank.used.__contains__)
            if offset is not None:
                place = offset, offset + 2 * (end - begin)
                assert offset >= 0 and place[1] <= self.shards[-1][1] and rank.holds(*place)
                for used in rank.used:
                    low, high = self.shards[used]
                    assert high <= place[0] or place[1] <= low, "a gradient lies where its own rank reads a shard"
                rank.gradients.append(place)
            rank.placement.count_reduces(1)


@pytest.mark.parametrize("surprises", [False, True])
def test_gradients_lie_where_nobody_reads(surprises):
    generator = random.Random(0)
    shares = []
    for _ in range(300):
        program = Program(generator)
        for step in range(STEPS):
            program.step(surprises and step % 3 == 2)
        assert program.placed_bytes[0] == 0  # nothing is known of the first backward
        shares.append(program.placed_bytes[-1] / program.shards[-1][1])
    assert sum(shares) / len(shares) > (0.1 if surprises else 0.3)


COUNT = 32


def many_shards():
    return _C.GradPlacement([(512 * i, 512 * (i + 1)) for i in range(COUNT)], 512 * COUNT)


def backward_from_the_end(placement, until=0):
    """Each parameter is gathered, read and reduced before the one in front of it; how many gradients got a place."""
    placed = 0
    for shard in reversed(range(until, COUNT)):
        assert not placement.is_dead(shard)
        placement.start_gather(shard)
        placement.finish_gather(shard, in_backward=True)
        placed += placement.place(1024, lambda shard: False) is not None
        placement.count_reduces(1)
    return placed


def test_a_backward_that_raised_is_forgotten():
    """Ranks that raised at different places learn the same from the next one, which finds all that it gathers.

    A backward from the end fills all places: half of the gradients, being twice as wide, fit.
    """
    ranks = [many_shards() for _ in range(3)]
    for step in range(4):
        for rank, until in zip(ranks, (COUNT // 2, COUNT // 3, COUNT), strict=True):
            rank.refresh()
            if step == 2:
                backward_from_the_end(rank, until)
                rank.refresh()
            assert backward_from_the_end(rank) == (0 if step == 0 else COUNT // 2)
            rank.finish_backward(is_caching=False)
        assert len({rank.learned() for rank in ranks}) == 1


def test_ranks_that_learned_different_things_are_told_apart():
    """The second does not gather the last shard in backward, and would overwrite it while the first reads it there."""
    ranks = [_C.GradPlacement([(0, 512), (512, 1024)], 1024) for _ in range(2)]
    assert ranks[0].learned() == ranks[1].learned()
    for rank, shards in zip(ranks, ([0, 1], [0]), strict=True):
        rank.count_reduces(1)
        for shard in shards:
            rank.start_gather(shard)
            rank.finish_gather(shard, in_backward=True)
        rank.finish_backward(is_caching=False)
    assert ranks[0].learned() != ranks[1].learned()
