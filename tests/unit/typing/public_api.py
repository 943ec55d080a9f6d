"""What a type checker makes of the public API; mypy reads this file, nothing runs it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgqueue import App, Backoff, Job, JobRef, JobType
from pgqueue.history import Status

app = App()


class Receipt:
    order_id: int = 0


@app.job(
    "receipt", queue="mail", priority=1, max_attempts=5, backoff=Backoff(cap=60), timeout=timedelta(minutes=1)
)
def send_receipt(receipt: Receipt, job: Job) -> None:
    assert_type(job.attempt, int)
    assert_type(job.key, str | None)
    assert_type(job.headers, dict[str, Any])


@app.job("pdf", process=True)
def render(receipt: Receipt) -> None: ...


@app.job("mail")
async def mail(receipt: Receipt, *, job: Job) -> None: ...


@app.job("tidy")
def tidy() -> None: ...


@app.job("tidy more")
def tidy_more(job: Job) -> None: ...


@app.schedule("0 2 * * *", timezone="Asia/Damascus", payload=Receipt(), missed="skip")
@app.job("nightly", sheddable=True)
def nightly(receipt: Receipt) -> None: ...


app.schedule("0 2 * * *")(tidy)
app.schedule("0 2 * * *", missed="never")  # type: ignore[arg-type]
app.schedule("0 2 * * *")(print)  # type: ignore[arg-type]


@app.on_event("order.placed")
def placed(event: dict[str, int]) -> None: ...


assert_type(send_receipt, JobType[Receipt])
assert_type(render, JobType[Receipt])
assert_type(mail, JobType[Receipt])
assert_type(nightly, JobType[Receipt])
assert_type(tidy, JobType[None])
assert_type(tidy_more, JobType[None])
assert_type(placed, JobType[dict[str, int]])


def enqueue(session: Session) -> None:
    assert_type(send_receipt.enqueue(session, Receipt()), JobRef)
    assert_type(
        send_receipt.using(key="a", priority=1, run_after=timedelta(1)).enqueue(session, Receipt()).id, int
    )
    assert_type(send_receipt.enqueue_many(session, [Receipt()]), list[JobRef])
    assert_type(tidy.enqueue(session).created, bool)
    assert_type(nightly.enqueue(session, Receipt()).shed, bool)
    assert_type(app.enqueue(session, "receipt", {"order_id": 1}, queue="mail", dedup_window="live"), JobRef)
    assert_type(
        send_receipt.enqueue(session, Receipt()).wait(session, timeout=timedelta(seconds=5)), Status | None
    )
    assert_type(JobRef(17).wait(session, 5), Status | None)
    send_receipt.enqueue(session, 5)  # type: ignore[arg-type]
    send_receipt.using(priorty=1)  # type: ignore[call-arg]
    send_receipt.using(priority="1")  # type: ignore[typeddict-item, arg-type, unused-ignore]
    app.enqueue(session, "receipt", urgent=True)  # type: ignore[call-arg]
    app.job("x", prority=1)  # type: ignore[call-arg]


async def aenqueue(session: AsyncSession) -> None:
    assert_type(await send_receipt.aenqueue(session, Receipt()), JobRef)
    assert_type(await send_receipt.aenqueue_many(session, [Receipt()]), list[JobRef])
    assert_type(await app.aenqueue(session, "receipt", {"order_id": 1}), JobRef)
