"""The demo as a user starts it: a process of its own, on its own embedded server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from pgqueue.embedded import EmbeddedUnavailable
from pgqueue.embedded.binaries import installed
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
FORGETS = "tests.process.shop_that_forgets"
CLAIMS = 8


def embedded_is_here() -> bool:
    try:
        installed()
    except EmbeddedUnavailable:
        return False
    return True


needs_embedded = pytest.mark.skipif(not embedded_is_here(), reason="server: none is embedded for this system")


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Give a file with the first purchases of the excerpt, two malformed ones among them."""
    lines = (ROOT / "examples/shop/orders.csv").read_text().splitlines()
    path = tmp_path / "few.csv"
    path.write_text("\n".join(lines[:321]) + "\n")
    return path


@contextmanager
def demo(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run the demo in a session of its own; whatever of it is left afterwards is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.shop.demo", *map(str, arguments)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(*arguments: object) -> tuple[int, str]:
    with demo(*arguments) as process:
        said, _ = process.communicate(timeout=300)
        return process.returncode, said


def descendants(pid: int) -> dict[int, str]:
    """Return the process ids below one, with what they are."""
    parents = {}
    names = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            parents[int(stat.parent.name)] = int(rest.split()[1])
            names[int(stat.parent.name)] = name.partition("(")[2]
    found: dict[int, str] = {}
    todo = [pid]
    while todo:
        above = todo.pop()
        below = [child for child, parent in parents.items() if parent == above]
        found |= {child: names[child] for child in below}
        todo += below
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@needs_embedded
def test_the_demo_proves_that_nothing_was_lost_doubled_or_reordered(few: Path) -> None:
    status, said = run("--orders", few)
    assert status == 0, said
    assert said.count("✓") == CLAIMS, said
    assert "✗" not in said
    assert re.search(r"SIGKILL to worker 1 \(\d+\) after \d+ orders; started again", said)
    assert re.search(r"SIGKILL to relay 1 \(\d+\) after \d+ orders; started again", said)
    assert "320 orders = 318 receipts + 2 dead letters" in said
    assert "2 malformed = 1 permanent + 1 undecodable, 0 unexplained" in said
    assert "320 orders = 320 distinct events = 320 parcels for 320 orders" in said
    lost, again = map(int, re.findall(r"(\d+) replies lost, (\d+) events came again", said)[0])
    assert 0 < lost <= again
    assert "\x1b" not in said, "plain lines where there is no terminal"


@needs_embedded
def test_the_proof_fails_where_receipts_are_forgotten_and_events_applied_twice(few: Path) -> None:
    status, said = run("--orders", few, "--app", f"{FORGETS}:app", "--receiver", FORGETS)
    assert status == 1, said
    wrong = re.findall(r"✗ (.*)", said)
    assert wrong == [
        "every order's event was published and applied once",
        "every order got its receipt or a dead letter",
        "duplicates were absorbed",
        "the money adds up",
    ]
    assert f"4 of {CLAIMS} do not hold" in said


@needs_embedded
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_a_stopped_demo_leaves_no_process_behind(number: signal.Signals, status: int) -> None:
    with demo() as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " orders · " in line:
                break
        family = descendants(process.pid)
        assert any("outbox-relay" in name for name in family.values()), family
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == status, said
        assert "Traceback" not in said
    eventually(lambda: not [pid for pid in family if is_running(pid)], timeout=10)


@needs_embedded
def test_a_process_that_ends_by_itself_is_shown_with_the_tail_of_its_log(few: Path) -> None:
    status, said = run("--orders", few, "--app", "examples.shop.jobs:nothing")
    assert status == 1
    assert re.search(r"error: worker \d ended with status 1", said), said
    assert "has no attribute 'nothing'" in said
    assert "Traceback" not in said


def test_a_database_that_holds_orders_already_is_refused(dsn: str, few: Path) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload) VALUES ('1', 'order.placed', '{}')"
        )
    began = time.monotonic()
    status, said = run("--orders", few, "--dsn", dsn)
    assert status == 1
    assert "holds orders already; name an empty one" in said
    assert "Traceback" not in said
    assert time.monotonic() - began < 60


def test_a_file_without_purchases_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("a,b\n1,2\n")
    status, said = run("--orders", path)
    assert status == 1
    assert "customer_id, date, items, dollars" in said
    assert "Traceback" not in said
