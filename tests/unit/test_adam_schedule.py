"""Parts and rounds of an Adam step that writes copies where gradients lie, carried out on bytes, the worst way."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile import _C

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
    items = [
        (numel, elsewhere, place(0)),
        (numel, over_first_two, place(4)),
        (numel, elsewhere, place(1)),
        (numel, over_last_two, place(5)),
    ]
    rounds, casts, is_copied = _C.adam_schedule([*items, (numel, elsewhere, place(3))], [])
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


def test_a_step_of_nothing_has_no_rounds():
    assert _C.adam_schedule([], []) == ([], [], [])
    assert carried_out([(0, (0, 0), (0, 0))], []) == ([False], 0)
