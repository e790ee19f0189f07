"""Curves with few points, for pictures and JSON."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Point = TypeVar("Point", bound=tuple[Any, ...])  # its first item is the time


def thinned(points: Sequence[Point], count: int, height: Callable[[Point], float]) -> list[Point]:
    """A curve of at most `count` + 2 points, with the peak at its own time.

    Keeps the first point, the last point, and the highest point of each of `count` equal spans of time. A curve of at
    most `count` points stays as it is.
    """
    if len(points) <= count:
        return list(points)
    begin, end = points[0][0], points[-1][0]
    span = max((end - begin) / count, 1e-30)
    highest: dict[int, Point] = {}
    for point in points[1:-1]:
        i = int((point[0] - begin) / span)
        if i not in highest or height(point) > height(highest[i]):
            highest[i] = point
    return [points[0], *highest.values(), points[-1]]
