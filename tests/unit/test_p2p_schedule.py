"""csrc/p2p/schedule over random sizes: places of cached shards and of gradients among them, order of Adam steps."""

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_nothing_takes_no_memory_and_no_rounds():
    assert _C.lay_out_cache([], 2) == ([], []) and _C.group_for_refresh([]) == []
    assert _C.adam_schedule([], []) == ([], [], []) and carried_out([(0, (0, 0), (0, 0))], []) == ([False], 0)


def test_groups_follow_the_order_small_shards_first():
    sizes = [LARGE, 512, LARGE, LARGE, 1024, LARGE]
    groups = _C.group_for_refresh(sizes)
    assert groups[1] == groups[4] == 0
    large = [groups[i] for i in (0, 2, 3, 5)]
    assert large == sorted(large) and large == [0, 4, 8, 12]


class Cache:
    """Main parameters and their cached copies, as numbers; copies are refreshed when the runtime would do so."""

    def __init__(self, count: int):
        self.staleness = _C.Staleness()
        self.main = [0] * count
        self.versions = [0] * count
        self.numbers: dict[int, int] = {}  # param -> number in staleness, from its first gather on
        self.copies: dict[int, int] = {}  # param -> contents, from the first refresh behind that on
        self.refreshes = 0

    def gather(self, param: int, in_backward: bool = False) -> None:
        number = self.numbers.setdefault(param, -1)
        if number == -1:
            number = self.numbers[param] = self.staleness.add()
        if self.staleness.is_stale(number, in_backward, self.versions[param] if param in self.copies else None):
            self.refresh()
        self.staleness.count_gather(number, in_backward)
        assert self.copies.get(param, self.main[param]) == self.main[param], "a gather reads an old copy"

    def refresh(self) -> None:
        for param, number in self.numbers.items():
            self.copies[param] = self.main[param]
            self.staleness.refresh(number, self.versions[param])
        self.staleness.finish_refresh()
        self.refreshes += 1

    def edit(self, param: int, moves_counter: bool = False) -> None:
        self.main[param] += 1
        self.versions[param] += moves_counter

    def edit_all(self) -> None:
        """As a fused optimizer does, which moves no version counter."""
        for param in range(len(self.main)):
            self.edit(param)


class Gathers:
    """How often a model gathers each parameter in forward and in backward."""

    def __init__(self, generator: random.Random):
        self.generator = generator
        count = generator.randrange(1, 7)
        self.forward_order = [param for param in range(count) for _ in range(generator.randrange(1, 4))]
        self.backward_order = [param for param in reversed(range(count)) for _ in range(generator.randrange(3))]
        self.cache = Cache(count)

    def forward(self) -> None:
        for param in self.forward_order:
            self.cache.gather(param)

    def backward(self, is_caching: bool = False) -> None:
        for param in self.backward_order:
            self.cache.gather(param, in_backward=True)
        self.cache.staleness.finish_backward(is_caching)

    def accumulate(self, edits: float = 0.2) -> None:
        """Microbatches of one step, between which main parameters stay as they are but for a few edits."""
        for _ in range(self.generator.randrange(1, 4)):
            self.forward()
            self.backward(is_caching=True)
            if self.generator.random() < edits:
                self.edit_one()
        self.cache.staleness.expire()

    def edit_one(self) -> None:
        self.cache.edit(self.generator.randrange(len(self.cache.main)), moves_counter=True)

    def do_anything(self) -> None:
        action = self.generator.randrange(4)
        if action == 0:
            self.accumulate()
        elif action == 1:
            self.edit_one()
        else:
            self.forward()
            if action == 2:
                if self.generator.random() < 0.3:
                    self.edit_one()
                self.backward()
        if action != 1 and self.generator.random() < 0.7:
            self.cache.edit_all()


def test_no_gather_reads_an_old_copy():
    generator = random.Random(0)
    for _ in range(300):
        gathers = Gathers(generator)
        for _ in range(2):  # in which is learned how often a forward gathers
            gathers.forward()
            gathers.backward()
            gathers.cache.edit_all()
        for _ in range(12):
            gathers.do_anything()


@pytest.mark.parametrize("part", ["step", "accumulation", "evaluation"])
def test_copies_are_refreshed_once(part):
    """Once a step, once for all microbatches of a step, once a forward that no backward follows."""
    generator = random.Random(1)
    for _ in range(50):
        gathers = Gathers(generator)
        for step in range(6):
            before = gathers.cache.refreshes
            if part == "accumulation" and step >= 2:
                gathers.accumulate(edits=0.0)
            else:
                gathers.forward()
                if part != "evaluation" or step < 2:
                    gathers.backward()
            gathers.cache.edit_all()
            assert step < 2 or gathers.cache.refreshes == before + 1


def test_a_copy_that_a_step_wrote_is_told_from_one_that_was_edited_since():
    staleness = _C.Staleness()
    number = staleness.add()
    staleness.write(number, 5)
    assert staleness.refresh(number, 5)
    assert not staleness.refresh(number, 6)
    assert staleness.refresh(number, 6)


def test_a_forward_that_gathers_twice_is_not_refreshed_half_way_once_that_is_known():
    cache = Cache(1)
    refreshes = []
    for _ in range(3):
        before = cache.refreshes
        cache.gather(0)
        cache.gather(0)
        cache.staleness.finish_backward(False)
        refreshes.append(cache.refreshes - before)
    assert refreshes == [1, 1, 1] and cache.staleness.is_expired()


def test_a_backward_that_gathers_is_remembered():
    staleness = _C.Staleness()
    first, second = staleness.add(), staleness.add()
    staleness.count_gather(first, True)
    staleness.count_gather(second, False)
    assert staleness.is_gathered_in_backward(first) and not staleness.is_gathered_in_backward(second)


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
        self.ranks = [Rank(_C.GradPlacement(self.shards, ends[-1])) for _ in range(3)]
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
                users = [rank for rank in self.ranks if shard in rank.used]
                readers += [(time + self.generator.choice((0, 1, 2.5)), rank, shard) for rank in users]
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
    """Ranks that raised at different places learn the same from the next. Half of the gradients, twice as wide, fit."""
    shards = [(512 * i, 512 * (i + 1)) for i in range(COUNT)]
    ranks = [_C.GradPlacement(shards, 512 * COUNT) for _ in range(3)]
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


UNIT = 1 << 15  # elements: parts are cut at multiples of 4096, and begin 131,072 from where a gradient meets its copy


def carried_out(items, others):
    """Runs the order; whether copies are whole, and how many elements of them the step itself wrote.

    Memory holds, for every 2 bytes, which element of which gradient they are a half of, or whose copy's element.
    """
    rounds, casts, is_copied = _C.adam_schedule(items, others)
    ends = [end for _, *spans in items for _, end in spans] + [end for _, end in others]
    memory = np.zeros(max(ends, default=0) // 2, dtype=np.int64)

    def gradient(item, begin, end):
        lies = items[item][1]
        return slice((lies[0] + 4 * begin) // 2, (lies[0] + 4 * end) // 2) if lies[0] < lies[1] else slice(0, 0)

    def copy(item, begin, end):
        numel, _, (low, high) = items[item]
        return slice((low + (high - low) // numel * begin) // 2, (low + (high - low) // numel * end) // 2)

    values = lambda item, begin, end: ((item + 1) << 33) + np.repeat(np.arange(begin, end), 2)
    for item, (numel, (low, high), _) in enumerate(items):
        if low < high:
            memory[gradient(item, 0, numel)] = values(item, 0, numel)
    for low, high in others:
        memory[low // 2 : high // 2] = -1
    steps = [np.zeros(numel, dtype=np.int64) for numel, *_ in items]
    written = 0
    for parts in rounds:
        writes = [copy(item, begin, end) for item, begin, end, also_copies in parts if also_copies]
        for item, begin, end, _ in parts:
            steps[item][begin:end] += 1
            reads = gradient(item, begin, end)
            if reads.start < reads.stop:
                assert (memory[reads] == values(item, begin, end)).all(), "a gradient is gone"
                overlaps = [write for write in writes if write.start < reads.stop and reads.start < write.stop]
                assert not overlaps, "a gradient is overwritten meanwhile"
        for item, begin, end, also_copies in parts:
            if also_copies:
                memory[copy(item, begin, end)] = -2 - item
                written += end - begin
    assert all((count == 1).all() for count in steps)
    for item, begin, end, also_copies in casts:
        assert not also_copies
        memory[copy(item, begin, end)] = -2 - item
    assert all((memory[low // 2 : high // 2] == -1).all() for low, high in others)
    whole = [item for item, is_whole in enumerate(is_copied) if is_whole]
    assert all((memory[copy(item, 0, items[item][0])] == -2 - item).all() for item in whole)
    return is_copied, written


@st.composite
def layouts(draw):
    """Copies side by side, and gradients over them wherever they fit, or elsewhere."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    widths = [draw(st.sampled_from([2, 2, 2, 4])) for _ in sizes]
    ends = np.cumsum([size * width for size, width in zip(sizes, widths)]).tolist()
    copies = [(end - size * width, end) for end, size, width in zip(ends, sizes, widths)]
    free, gradients, others = [(0, ends[-1])], [], []

    def place(units):
        places = [(begin, end) for begin, end in free if end - begin >= units]
        if not places or draw(st.booleans()):
            return (0, 0)
        begin, end = draw(st.sampled_from(places))
        first = draw(st.integers(begin, end - units))
        free.remove((begin, end))
        free.extend([(begin, first), (first + units, end)])
        return (first, first + units)

    for item in draw(st.permutations(range(len(sizes)))):
        gradients.append((item, place(sizes[item] * 4)))
    if draw(st.booleans()):
        others.append(place(1))
    spans = dict(gradients)
    scaled = lambda span: (span[0] * UNIT, span[1] * UNIT)
    items = [(size * UNIT, scaled(spans[i]), scaled(copies[i])) for i, size in enumerate(sizes)]
    return items, [scaled(span) for span in others if span[0] < span[1]]


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_no_gradient_is_overwritten_before_it_is_read(layout):
    carried_out(*layout)


def test_a_gradient_over_its_own_place_is_stepped_in_growing_parts():
    numel = 1 << 22
    for shift in (0, numel, numel + 1536, 2 * numel):  # the copy lies at the beginning of the gradient, and further on
        is_copied, written = carried_out([(numel, (0, 4 * numel), (shift, shift + 2 * numel))], [])
        assert is_copied == [True] and written >= numel - (1 << 18)


def test_gradients_over_the_places_of_others_step_in_turn():
    numel = 1 << 18
    place = lambda i: (i * 2 * numel, (i + 1) * 2 * numel)
    elsewhere, over_first_two, over_last_two = (0, 0), (0, 4 * numel), (4 * numel, 8 * numel)
    lie = (elsewhere, 0), (over_first_two, 4), (elsewhere, 1), (over_last_two, 5), (elsewhere, 3)
    rounds, casts, is_copied = _C.adam_schedule([(numel, span, place(i)) for span, i in lie], [])
    assert casts == [] and all(is_copied)
    assert [sorted(part[0] for part in parts) for parts in rounds] == [[1, 3], [0, 2, 4]]


def test_what_lies_over_another_gradient_is_left():
    numel = 1 << 18
    items = [(numel, (0, 0), (0, 2 * numel)), (numel, (0, 0), (2 * numel, 4 * numel))]
    is_copied, written = carried_out(items, [(0, 512)])
    assert is_copied == [False, True] and written == numel


def test_a_ring_is_cast_afterwards():
    numel = 1 << 18
    places = [(0, 4 * numel), (4 * numel, 8 * numel)]
    items = [(numel, places[1], (0, 2 * numel)), (numel, places[0], (4 * numel, 6 * numel))]
    rounds, casts, is_copied = _C.adam_schedule(items, [])
    assert len(rounds) == 2 and [part[0] for part in casts] == [0] and is_copied == [True, True]
