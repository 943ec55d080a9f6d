"""The retry budget of one process: when it asks for tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pgqueue.budget import Report
from pgqueue.hand import Ended
from pgqueue.job import Retried
from pgqueue.retries import PAUSE, Retries
from tests.factories import BROKEN, claimed


def failed(number: int) -> Ended:
    return Ended(claimed(number), Retried(delay=1.0, failure=BROKEN, later=100.0), 0.0)


def delays(ended: Sequence[Ended]) -> list[float]:
    return [one.outcome.delay for one in ended if isinstance(one.outcome, Retried)]


def test_a_job_that_fails_in_the_first_moments_of_a_worker_is_retried_by_its_backoff() -> None:
    """A worker that may not ask yet puts it off by minutes, though the budget is untouched."""
    now, asked = time.monotonic(), []

    def draw(reports: Sequence[Report]) -> dict[str, int]:
        asked.append([report.want for report in reports])
        return {report.queue: report.want for report in reports}

    retries = Retries([("", 0), ("default", 5)], on=True, clock=lambda: now)
    retries.draw = draw
    assert delays(retries.spend([failed(1)])) == [1.0]
    assert delays(retries.spend([failed(2)])) == [100.0]  # so soon after the last time it does not ask again
    now += 2 * PAUSE
    assert delays(retries.spend([failed(3)])) == [1.0]
    assert asked == [[1], [1]]


def test_a_failure_takes_back_what_a_success_has_earned_but_that_of_a_deferred_retry_has_paid() -> None:
    retries = Retries([("", 0), ("default", 5)], on=True)
    paid, *late = (claimed(number)._replace(extra='{"deferred" : true}') for number in range(2, 6))
    retries.ran([claimed(1)], [])  # earns two
    retries.ran([], [Ended(paid, Retried(delay=1.0, failure=BROKEN), 0.0)])
    assert retries.refuse(late) == late[2:]
    retries.ran([claimed(1)], [failed(2)])
    assert retries.refuse(late) == late[1:]
