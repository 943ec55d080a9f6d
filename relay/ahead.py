"""One call in a thread of its own, while the caller waits for something else."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """A call that has begun. Whatever it works with belongs to it until `wait` has returned."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._answers: list[T] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="relay-ahead", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the call has ended, whatever became of it."""
        self._thread.join()

    def result(self) -> T:
        """Wait for the call; return what it returned, or raise what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._answers[0]

    def _run(self) -> None:
        try:
            self._answers.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised where the answer is asked for
            self._error = error
