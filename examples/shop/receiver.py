"""The warehouse: takes the shop's events by webhook and packs one parcel for each order.

    python -m examples.shop.receiver --port 8070 --secret whsec_...

Deliveries are at least once, so some come twice; `relay.Inbox` notes the key of each in the transaction that packs
the parcel. `--lose-every` hangs up on some deliveries after the commit, as a network does now and then: the relay
cannot know, and sends the event again.
"""

from __future__ import annotations

import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

import click
import msgspec
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from examples.shop.checkout import OrderPlaced
from examples.shop.models import Parcel, Repeat, begin, create_tables
from relay import Inbox

LONGEST_BODY = 64 * 1024

inbox = Inbox()


def pack(event: OrderPlaced, *, key: str, source: str, reply_lost: bool) -> bool:
    """Pack the parcel of an order in one transaction with the note that it is done; False for a repetition."""
    with begin() as session:
        if not inbox.claim(session, key, consumer="warehouse", source=source):
            session.add(Repeat(what="event", order_id=event.order_id))
            return False
        session.add(
            Parcel(
                order_id=event.order_id, customer=event.customer, dollars=event.dollars, reply_lost=reply_lost
            )
        )
        return True


class Warehouse(ThreadingHTTPServer):
    """The server. `lose_every` = n: the reply to every n-th first delivery is lost."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], secret: str, lose_every: int) -> None:
        super().__init__(address, Delivery)
        self.webhook = Webhook(secret)
        self._lose_every = lose_every
        self._count = 0
        self._lock = Lock()

    def lose_this(self) -> bool:
        """Tell whether the reply to this delivery is to be lost."""
        with self._lock:
            self._count += 1
            return self._lose_every > 0 and self._count % self._lose_every == 0


class Delivery(BaseHTTPRequestHandler):
    """One connection of a relay."""

    server: Warehouse
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_POST(self) -> None:
        """Check the signature, pack, answer 204. 4xx = never send this again."""
        length = self.headers.get("content-length", "")
        if not length.isdigit() or int(length) > LONGEST_BODY:
            self.close_connection = True
            self.answer(413)
            return
        body = self.rfile.read(int(length))
        try:
            self.server.webhook.verify(body, {name.lower(): value for name, value in self.headers.items()})
        except WebhookVerificationError:
            self.answer(401)
            return
        try:
            event = msgspec.json.decode(body, type=OrderPlaced)
        except msgspec.DecodeError:
            self.answer(422)
            return
        lose = self.server.lose_this()
        if (
            pack(event, key=self.headers["webhook-id"], source=self.headers["ce-source"], reply_lost=lose)
            and lose
        ):
            self.close_connection = True
            return
        self.answer(204)

    def answer(self, status: int) -> None:
        """Send a status without a body."""
        self.send_response_only(status)
        if status != 204:
            self.send_header("content-length", "0")
        self.end_headers()


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8070, show_default=True, help="0 picks a free one.")
@click.option("--secret", envvar="SHOP_WEBHOOK_SECRET", required=True, help="What the relay signs with.")
@click.option("--lose-every", default=0, show_default=True, help="Lose the reply to every n-th delivery.")
def main(host: str, port: int, secret: str, lose_every: int) -> None:
    """Receive the shop's events until SIGTERM or SIGINT."""
    create_tables()
    server = Warehouse((host, port), secret, lose_every)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: Thread(target=server.shutdown).start())
    print(f"listening on http://{host}:{server.server_port}/events", flush=True)
    server.serve_forever(poll_interval=0.1)
    sys.stdout.flush()
    os._exit(0)  # connections that relays keep open would hold the process


if __name__ == "__main__":
    main()
