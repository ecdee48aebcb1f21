"""An ordered parallel map that holds back: results come in order, and only so much is under way at once."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ordered_map"]

In = TypeVar("In")
Out = TypeVar("Out")


def ordered_map(
    pool: ThreadPoolExecutor,
    work: Callable[[In], Out],
    items: Sequence[In],
    sizes: Sequence[int],
    ahead: int,
    most: int,
) -> Iterator[Out]:
    """`work` of each item, in order.

    Args:
        pool: where it runs.
        work: what to do.
        items: what to do it with.
        sizes: bytes that each takes.
        ahead: items under way at once.
        most: bytes under way at once, not counting the item that is needed next.
    """
    running: deque[tuple[Future[Out], int]] = deque()
    at = 0
    try:
        for _ in items:
            while at < len(items) and (
                not running or (len(running) < ahead and sum(size for _, size in running) + sizes[at] <= most)
            ):
                running.append((pool.submit(work, items[at]), sizes[at]))
                at += 1
            yield running.popleft()[0].result()
    finally:
        for future, _ in running:
            future.cancel()
