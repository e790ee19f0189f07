"""When cached copies of shards are stale: no gather of a random program reads one older than its main parameter."""

import random

import pytest

from zcompile import _C


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


class Program:
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
        program = Program(generator)
        for _ in range(2):  # in which is learned how often a forward gathers
            program.forward()
            program.backward()
            program.cache.edit_all()
        for _ in range(12):
            program.do_anything()


@pytest.mark.parametrize("part", ["step", "accumulation", "evaluation"])
def test_copies_are_refreshed_once(part):
    """Once a step, once for all microbatches of a step, once a forward that no backward follows."""
    generator = random.Random(1)
    for _ in range(50):
        program = Program(generator)
        for step in range(6):
            before = program.cache.refreshes
            if part == "accumulation" and step >= 2:
                program.accumulate(edits=0.0)
            else:
                program.forward()
                if part != "evaluation" or step < 2:
                    program.backward()
            program.cache.edit_all()
            assert step < 2 or program.cache.refreshes == before + 1


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
