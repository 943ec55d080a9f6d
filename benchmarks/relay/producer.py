"""Write events at a steady rate, each in a transaction of its own, and note when each commit returned.

    python -m benchmarks.relay.producer DSN COUNT RATE CLIENTS FILE

Writes a line for each event: its id and the time, in seconds since 1970.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import psycopg

from benchmarks.relay.peers import EVENT_TYPE, aggregate, event
from relay import Outbox


def main(dsn: str, count: int, rate: float, clients: int, file: Path) -> None:
    """Write the events from `clients` connections, and the file."""
    outbox = Outbox()
    committed: list[tuple[int, float]] = []
    start = time.monotonic() + 0.2

    def write(client: int) -> None:
        with psycopg.connect(dsn, prepare_threshold=0) as connection:
            for number in range(client, count, clients):
                time.sleep(max(0.0, start + number / rate - time.monotonic()))
                id_ = outbox.add(connection, EVENT_TYPE, event(number), aggregate_id=aggregate(number))
                connection.commit()
                committed.append((id_, time.time()))

    threads = [threading.Thread(target=write, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.write_text("".join(f"{id_} {at:.6f}\n" for id_, at in committed))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
