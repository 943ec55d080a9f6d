"""Jobs whose effects are rows: transactional handlers over every kind of handle, and idempotency keys."""

from __future__ import annotations

import psycopg
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from pgqueue import App, Job

app = App()

INSERT = "INSERT INTO public.effect (kind, attempt) VALUES ('{kind}', {attempt})"


def sentence(kind: str, job: Job) -> str:
    """Return the effect of one attempt."""
    return INSERT.format(kind=kind, attempt=job.attempt)


@app.job("psycopg", transactional=True)
def with_psycopg(kind: str, conn: psycopg.Connection, job: Job) -> None:
    """Write an effect; fail when told so."""
    conn.execute(sentence(kind, job))
    fail(kind, job)


@app.job("apsycopg", transactional=True)
async def with_async_psycopg(kind: str, conn: psycopg.AsyncConnection, job: Job) -> None:
    """Write an effect; fail when told so."""
    await conn.execute(sentence(kind, job))
    fail(kind, job)


@app.job("connection", transactional=True)
def with_connection(kind: str, conn: sqlalchemy.Connection, job: Job) -> None:
    """Write an effect; fail when told so."""
    conn.execute(sqlalchemy.text(sentence(kind, job)))
    fail(kind, job)


@app.job("session", transactional=True)
def with_session(kind: str, session: Session, job: Job) -> None:
    """Write an effect, commit it (a savepoint here), and fail when told so."""
    session.execute(sqlalchemy.text(sentence(kind, job)))
    session.commit()
    fail(kind, job)


@app.job("aconnection", transactional=True)
async def with_async_connection(kind: str, conn: AsyncConnection, job: Job) -> None:
    """Write an effect; fail when told so."""
    await conn.execute(sqlalchemy.text(sentence(kind, job)))
    fail(kind, job)


@app.job("asession", transactional=True)
async def with_async_session(kind: str, session: AsyncSession, job: Job) -> None:
    """Write an effect; fail when told so."""
    await session.execute(sqlalchemy.text(sentence(kind, job)))
    fail(kind, job)


def fail(kind: str, job: Job) -> None:
    """Fail the first attempt of what is to fail once."""
    if kind.startswith("fail") and job.attempt == 1:
        raise RuntimeError("the first attempt fails")
