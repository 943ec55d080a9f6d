"""The main job: the shop on a real stream of orders, with kills on the way, and the proof that nothing went wrong.

    python -m examples.shop.demo [--orders FILE] [--dsn DSN]

An embedded PostgreSQL, two workers, two relays and a warehouse run beside it. One worker and one relay are killed
with SIGKILL and started again, the warehouse loses replies, some orders are malformed. The exit status is 1 if
anything that has to hold does not.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterable
from contextlib import ExitStack
from decimal import Decimal
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Self

import click

from examples.shop import buy, proof, report, request_time
from examples.shop.children import Child, ChildFailed, Children
from examples.shop.models import create_tables, engine
from examples.shop.progress import Progress
from pgqueue import ConfigError
from pgqueue import dsn as dsns
from pgqueue.cli import Command, database
from pgqueue.embedded import SCHEME
from pgqueue.migrate import upgrade

VISIBILITY = "3s"
LEASE = "2s"
LOSE_EVERY = 50
RATE = 250.0
LOOK_S = 0.2
START_S = 60.0
#: So long nothing may move before the demo gives up and shows what is missing.
STUCK_S = 60.0
TIMED = 50

BUSY = "SELECT EXISTS (SELECT FROM pgqueue.job) OR (SELECT pending > 0 FROM pgqueue.outbox_lag)"
COUNTS = """
SELECT (SELECT count(*) FROM shop.orders), (SELECT count(*) FROM shop.receipts),
       (SELECT count(*) FROM pgqueue.dead_job), (SELECT count(*) FROM shop.parcels)
"""


@click.command(cls=Command)
@click.option(
    "--orders",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=buy.EXCERPT,
    help="CSV of purchases: customer_id, date, items, dollars.  [default: the excerpt beside this file]",
)
@click.option("--dsn", default="embedded:", show_default=True, help="An empty database to use.")
@click.option("--rate", type=float, default=RATE, show_default=True, help="Purchases a second, at most.")
@click.option("--app", default="examples.shop.jobs:app", show_default=True, help="What the workers run.")
@click.option(
    "--receiver", default="examples.shop.receiver", show_default=True, help="Module of the warehouse."
)
def main(orders: Path, dsn: str, rate: float, app: str, receiver: str) -> None:
    """Run the shop on a stream of orders and prove that nothing was lost, doubled or reordered."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # ticks, on a terminal that knows none
    purchases = buy.read(orders)
    with ExitStack() as stack:
        if dsn.startswith(SCHEME):
            print("an embedded PostgreSQL starts", flush=True)
        url = stack.enter_context(database(dsn))
        demo = stack.enter_context(Demo(url, purchases, rate))
        try:
            demo.prepare(app, receiver)
            demo.run()
            holds = demo.report()
        except KeyboardInterrupt:
            demo.progress.say("stopping")
            stack.close()
            sys.exit(130)
    sys.exit(0 if holds else 1)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class Demo:
    """One run."""

    def __init__(self, url: str, purchases: list[buy.Purchase], rate: float) -> None:
        os.environ["DATABASE_URL"] = url
        self.purchases = purchases
        self.progress = Progress(total=len(purchases))
        self.secret = "whsec_" + b64encode(os.urandom(24)).decode()
        self._url = url
        self._stack = ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="shop-demo-"))
        self._buyers = buy.Buyers(purchases=purchases, rate=rate)
        self._last: tuple[Any, ...] = ()
        self._moved_at = time.monotonic()

    def __enter__(self) -> Self:
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._stack.callback(lambda: engine().dispose())
        self._stack.callback(self._buyers.join)
        self.children = self._stack.enter_context(
            Children(
                folder=self._folder,
                environment={"PGQUEUE_DSN": self._url, "DATABASE_URL": self._url, "OUTBOX_WEBHOOK_SECRET": self.secret,
                             "SHOP_WEBHOOK_SECRET": self.secret, "PYTHONUNBUFFERED": "1"},
            )
        )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def prepare(self, app: str, receiver: str) -> None:
        """Migrate, make the shop's tables, start everything, wait until it works."""
        upgrade(self._url)
        self.connection = self._stack.enter_context(dsns.connect(self._url, autocommit=True))
        create_tables()
        if self._one("SELECT EXISTS (SELECT FROM shop.orders) OR EXISTS (SELECT FROM pgqueue.outbox)"):
            raise ConfigError(
                "the database holds orders already; name an empty one with --dsn, or leave --dsn out"
            )
        version = self._one("SHOW server_version")
        self.progress.say(f"PostgreSQL {version}: migrated, the shop's tables are made")
        children = self.children
        warehouse = children.start(
            "warehouse", "python", "-m", receiver, "--port", "0", "--lose-every", str(LOSE_EVERY)
        )
        self.webhook = self._wait(lambda: _after(warehouse.text(), "listening on "))
        self.workers = [
            children.start(
                f"worker {n}", "pgqueue-worker", app, "--queues", "mail", "--visibility", VISIBILITY
            )
            for n in (1, 2)
        ]
        self.relays = [
            children.start(
                f"relay {n}", "outbox-relay", "--sink", self.webhook, "--name", f"relay {n}", "--lease", LEASE,
                "--parallel", "8", "--source", "/outbox/shop", "--allow-private",
            )
            for n in (1, 2)
        ]  # fmt: skip
        self._wait(lambda: self._one("SELECT count(*) = 2 FROM pgqueue.workers WHERE alive"))
        self._wait(lambda: self._one("SELECT relays = 2 AND orphan_partitions = 0 FROM pgqueue.outbox_lag"))
        self.progress.say(
            f"two workers (visibility {VISIBILITY}), two relays (lease {LEASE}), the warehouse: started"
        )
        self.progress.say(f"{len(self.purchases):,} purchases; the warehouse loses one reply in {LOSE_EVERY}")

    def run(self) -> None:
        """Buy everything, kill on the way, wait until nothing is left to do."""
        total = len(self.purchases)
        kills = [(total // 3, self.workers[0]), (total // 2, self.relays[0])]
        self.began = time.monotonic()
        self._buyers.start()
        self._moved_at = time.monotonic()
        while self._buyers.busy or self._one(BUSY):
            self.children.check()
            placed = self._look()
            if kills and placed >= kills[0][0]:
                self._kill(kills.pop(0)[1], placed)
            if time.monotonic() - self._moved_at > STUCK_S:
                self.progress.say(f"nothing has moved for {STUCK_S:.0f} s")
                break
            time.sleep(LOOK_S)
        self._look(last=True)

    def _look(self, *, last: bool = False) -> int:
        """Draw the progress; return how many orders are placed."""
        (counts,) = self.connection.execute(COUNTS).fetchall()
        placed, receipts, dead, parcels = counts
        if counts != self._last:
            self._last, self._moved_at = counts, time.monotonic()
        rate = parcels / max(0.001, time.monotonic() - self.began)
        self.progress.show(
            min(receipts + dead, parcels),
            f"{placed:,} orders · {receipts:,} receipts · {dead} dead · {parcels:,} parcels · {rate:.0f}/s",
            last=last,
        )
        return int(placed)

    def _kill(self, child: Child, placed: int) -> None:
        pid = child.kill()
        child.start()
        self.progress.say(
            f"SIGKILL to {child.name} ({pid}) after {placed:,} orders; started again ({child.pid})"
        )

    def _one(self, query: str) -> Any:
        row = self.connection.execute(query).fetchone()
        return row[0] if row else None

    def _wait(self, look: Any) -> Any:
        until = time.monotonic() + START_S
        while not (seen := look()):
            self.children.check()
            if time.monotonic() > until:
                raise ChildFailed(
                    "the demo", f"did not get ready in {START_S:.0f} s", self.children.all[-1].tail()
                )
            time.sleep(LOOK_S / 4)
        return seen

    def report(self) -> bool:
        """Print what was reached; tell whether all of it holds."""
        seconds = time.monotonic() - self.began
        facts, speed = proof.facts(self.connection), proof.speed(self.connection)
        depth = list(report.depth(self.connection))
        claims = proof.claims(facts, orders=len(self.purchases), dollars=_dollars(self.purchases))
        # Measured now that nothing else runs, after the counts of the proof were taken.
        times = request_time.measure(self.purchases[:TIMED], url=self.webhook, secret=self.secret)
        pages = (depth, report.rates(facts, speed), report.waits(times), report.proof(claims))
        self.progress.say("\n" + "\n\n".join("\n".join(page) for page in pages))
        broken = sum(not claim.holds for claim in claims)
        verdict = f"{broken} of {len(claims)} do not hold" if broken else f"all {len(claims)} hold"
        self.progress.say(f"\n{verdict}; the orders took {seconds:.0f} s")
        return not broken


def _dollars(purchases: Iterable[buy.Purchase]) -> Decimal:
    return sum((purchase.dollars for purchase in purchases), Decimal(0))


def _after(text: str, words: str) -> str | None:
    line = next((line for line in text.splitlines() if line.startswith(words)), None)
    return line.removeprefix(words) if line else None


if __name__ == "__main__":
    main()
