"""The shelf: jobs that this process has claimed and not started, in the order they are to start.

One deque a queue, kept in (level, position) order. Whoever has a free slot takes from the queues it serves, in
their order: a general slot from all of them, a reserved slot from its own. `deque.popleft` is atomic, so takers
need no lock; only `put` reorders, and there is one thread that puts.

An item is a Claimed, or a LaneHold: the jobs of one ordering key, which run one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pgqueue.job import Claimed


@dataclass(slots=True, eq=False)
class LaneHold:
    """A lane in hand: its jobs in order, the next one first. `wait`: seconds the lane must rest when given back."""

    queue: str
    key: str
    lease: int
    level: int
    pos: int
    jobs: deque[Claimed] = field(default_factory=deque)
    ids: tuple[int, ...] = ()
    wait: float = 0.0


Item = Claimed | LaneHold


class Shelf:
    """Claimed jobs by queue."""

    def __init__(self, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._by_queue: dict[str, deque[Item]] = {queue: deque() for queue in queues}
        self.general: tuple[deque[Item], ...] = tuple(self._by_queue.values())
        #: How many items wait: asked once per job, so with one queue it is the deque's own method.
        self.size: Callable[[], int] = self.general[0].__len__ if len(queues) == 1 else self.__len__

    def of(self, queue: str) -> tuple[deque[Item], ...]:
        """Return what a slot reserved for one queue takes from."""
        return (self._by_queue[queue],)

    def put(self, queue: str, items: Sequence[Item]) -> None:
        """Add items that are in order among themselves; keep the whole queue in order."""
        shelf = self._by_queue[queue]
        try:
            behind = not shelf or _order(shelf[-1]) <= _order(items[0])
        except IndexError:  # a taker emptied it in between
            behind = True
        if behind:
            shelf.extend(items)
            return
        held = list(_drain(shelf))
        held.extend(items)
        held.sort(key=_order)
        shelf.extend(held)

    def suits(self, slots: Iterable[str | None]) -> bool:
        """Tell whether one of these slots (None: a general one, else the queue it is kept for) may take something."""
        return any(any(self.general) if queue is None else self._by_queue[queue] for queue in slots)

    def clear(self) -> list[Item]:
        """Take everything off the shelf."""
        return [item for shelf in self.general for item in _drain(shelf)]

    def __len__(self) -> int:
        return sum(map(len, self.general))


def take(shelves: tuple[deque[Item], ...]) -> Item | None:
    """Take the next item of the first shelf that has one."""
    for shelf in shelves:
        try:
            return shelf.popleft()
        except IndexError:
            continue
    return None


def _drain(shelf: deque[Item]) -> Iterable[Item]:
    while True:
        try:
            yield shelf.popleft()
        except IndexError:
            return


def _order(item: Item) -> tuple[int, int]:
    return item.level, item.pos
