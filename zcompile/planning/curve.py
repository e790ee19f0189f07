"""Curves with few points, for pictures and JSON."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Point = TypeVar("Point", bound=tuple)  # its first item is the time


def thinned(points: Sequence[Point], count: int, height: Callable[[Point], float]) -> list[Point]:
    """The first, the last, and of each of `count` equal spans of time the highest: so the peak is there, at its time."""
    if len(points) <= count:
        return list(points)
    begin, end = points[0][0], points[-1][0]
    span = max((end - begin) / count, 1e-30)
    highest: dict[int, Point] = {}
    for point in points[1:-1]:
        number = int((point[0] - begin) / span)
        if number not in highest or height(point) > height(highest[number]):
            highest[number] = point
    return [points[0], *highest.values(), points[-1]]
