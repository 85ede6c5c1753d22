"""The Pareto front of points with two values, of which less is better."""

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point dominates, in ascending order of the first value.

    A point dominates another if it is no worse in both values and better in one. Equal points do not dominate each
    other: the front has all of them or none.
    """
    front, least = list[int](), float("inf")
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        second = points[index][1]
        if second < least or (front and points[index] == points[front[-1]]):
            front.append(index)
            least = second
    return front


def dominates(point: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether `point` is no worse than `other` in both values, and better in one."""
    return point != other and point[0] <= other[0] and point[1] <= other[1]
