"""The webhook sink: signature, headers, and what each answer means."""

from __future__ import annotations

import base64
import contextlib
import math
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Confirmed, Event, Receipt, Rejected, Unavailable
from relay.sinks import Sink, SinkContext, SinkUnavailable, open_sink, pinned
from tests.sinks.conftest import SECRET, SOURCE, Made
from tests.sinks.receiver import OK, Answer, Receiver

NEW_SECRET = "whsec_" + base64.b64encode(b"n" * 32).decode()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Give a receiver that takes everything."""
    with Receiver() as listening:
        yield listening


@pytest.fixture
def sink(receiver: Receiver) -> Iterator[Sink]:
    """Give a sink that signs with two secrets."""
    made = open_sink(
        receiver.url, SinkContext(source=SOURCE, allow_private=True, secrets=[NEW_SECRET, SECRET])
    )
    yield made
    made.close()


def one(sink: Sink, event: Event) -> Receipt:
    """Publish one event."""
    (receipt,) = sink.publish([event])
    return receipt


def test_each_secret_of_a_rotation_verifies_the_body(receiver: Receiver, sink: Sink) -> None:
    one(sink, Made().event("order-é", '{"total": 1.50, "é": "ü"}'))
    (got,) = receiver.kept
    for secret in (SECRET, NEW_SECRET):
        assert Webhook(secret).verify(got.body, dict(got.headers)) == {"total": 1.5, "é": "ü"}
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + base64.b64encode(b"x" * 32).decode()).verify(got.body, dict(got.headers))
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(got.body + " ", dict(got.headers))


def test_the_id_is_the_same_in_every_attempt_and_the_timestamp_is_not_older(
    receiver: Receiver, sink: Sink
) -> None:
    event = Made().event()
    one(sink, event)
    one(sink, event)
    first, second = receiver.kept
    assert first.headers["webhook-id"] == second.headers["webhook-id"] == f"outbox:{event.id}"
    assert int(first.headers["webhook-timestamp"]) <= int(second.headers["webhook-timestamp"])


def test_headers_are_cloudevents_in_binary_mode(receiver: Receiver, sink: Sink) -> None:
    one(sink, Made().event("order-1"))
    (got,) = receiver.kept
    assert {name: value for name, value in got.headers.items() if name.startswith("ce-")} == {
        "ce-specversion": "1.0",
        "ce-id": "outbox:1",
        "ce-source": SOURCE,
        "ce-type": "order.placed",
        "ce-subject": "order/order-1",
        "ce-partitionkey": "order-1",
        "ce-sequence": "0000000000000000001",
        "ce-time": "2030-01-02T03:04:05.000000Z",
        "ce-traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    assert got.headers["content-type"] == "application/json"
    assert got.headers["traceparent"] == got.headers["ce-traceparent"]


def test_without_a_secret_there_is_no_signature(receiver: Receiver) -> None:
    made = open_sink(receiver.url, SinkContext(source=SOURCE, allow_private=True))
    one(made, Made().event())
    made.close()
    assert "webhook-signature" not in receiver.kept[0].headers


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_2xx_confirms(receiver: Receiver, sink: Sink, status: int) -> None:
    receiver.answer = lambda _: Answer(status=status)
    assert one(sink, Made().event()) == CONFIRMED


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 451])
def test_4xx_rejects_with_what_the_receiver_said(receiver: Receiver, sink: Sink, status: int) -> None:
    receiver.answer = lambda _: Answer(status=status, body=b"no such customer")
    assert one(sink, Made().event()) == Rejected(f"HTTP {status}: no such customer")


def test_a_target_that_answers_410_is_sent_nothing_more(receiver: Receiver, sink: Sink) -> None:
    made = Made()
    receiver.answer = lambda _: Answer(status=410)
    receipt = one(sink, made.event("order-1"))
    assert isinstance(receipt, Unavailable)
    assert "410 Gone" in receipt.reason
    assert receipt.retry_after == math.inf
    receiver.answer = lambda _: OK
    sink.close()
    for _ in range(2):
        with pytest.raises(SinkUnavailable, match="restart the relay") as gone:
            sink.publish([made.event("order-2")])
        assert gone.value.retry_after == math.inf
    assert len(receiver.seen) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_rejected_and_not_followed(receiver: Receiver, sink: Sink, status: int) -> None:
    with Receiver() as elsewhere:
        receiver.answer = lambda _: Answer(status=status, headers={"location": elsewhere.url})
        receipt = one(sink, Made().event())
        assert isinstance(receipt, Rejected)
        assert elsewhere.url in receipt.reason
        assert not elsewhere.seen


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_later_and_5xx_answers_are_no_rejection(receiver: Receiver, sink: Sink, status: int) -> None:
    receiver.answer = lambda _: Answer(status=status)
    assert one(sink, Made().event()) == Unavailable(f"HTTP {status}")


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured_in_both_forms(receiver: Receiver, sink: Sink, form: str) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=3600), usegmt=True)
    header = {"seconds": "7", "date": date}[form]
    receiver.answer = lambda _: Answer(status=503, headers={"retry-after": header})
    receipt = one(sink, Made().event())
    assert isinstance(receipt, Unavailable)
    assert receipt.retry_after is not None
    assert receipt.retry_after == 7 if form == "seconds" else 3000 < receipt.retry_after <= 3600


def test_a_retry_after_that_makes_no_sense_is_ignored(receiver: Receiver, sink: Sink) -> None:
    receiver.answer = lambda _: Answer(status=429, headers={"retry-after": "soon"})
    assert one(sink, Made().event()) == Unavailable("HTTP 429")


def test_a_lost_reply_is_unavailable_and_the_next_attempt_a_repetition(
    receiver: Receiver, sink: Sink
) -> None:
    event = Made().event()
    receiver.answer = lambda _: Answer(hang_up=True)
    assert isinstance(one(sink, event), Unavailable)
    receiver.answer = lambda _: OK
    assert one(sink, event) == CONFIRMED
    assert [d.key for d in receiver.kept] == [event.idempotency_key] * 2


class Bare:
    """Takes connections, gives each request the next of these answers as it stands, and ends the connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.ended = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Sink:
        self.thread.start()
        port = self.listening.getsockname()[1]
        context = SinkContext(source=SOURCE, allow_private=True, parallel=1)
        return open_sink(f"http://127.0.0.1:{port}/events", context)

    def __exit__(self, *_: object) -> None:
        self.thread.join(60)
        self.listening.close()

    def _serve(self) -> None:
        for answer in self.answers:
            connection, _ = self.listening.accept()
            with connection:
                while b"{}" not in connection.recv(65_536):
                    pass
                connection.sendall(answer)
            self.ended.release()


def test_a_kept_connection_that_the_receiver_ended_is_not_used_again() -> None:
    bare = Bare(*[b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"] * 3)
    with bare as sink:
        for event in (Made().event(), Made().event("order-2"), Made().event("order-3")):
            assert one(sink, event) == CONFIRMED
            assert bare.ended.acquire(timeout=60)
        sink.close()


class Endless:
    """Takes connections, answers each request with a beginning, and then the same piece again and again."""

    def __init__(self, beginning: bytes, piece: bytes, pause: float) -> None:
        self.beginning = beginning
        self.piece = piece
        self.pause = pause
        self.over = threading.Event()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Sink:
        self.thread.start()
        return open_sink(
            f"http://127.0.0.1:{self.listening.getsockname()[1]}/events",
            SinkContext(source=SOURCE, allow_private=True, parallel=1),
        )

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(60)
        self.listening.close()

    def _serve(self) -> None:
        connection, _ = self.listening.accept()
        with connection, contextlib.suppress(OSError):
            while b"{}" not in connection.recv(65_536):
                pass
            connection.sendall(self.beginning)
            while not self.over.wait(self.pause):
                connection.sendall(self.piece)


def in_the_end(sink: Sink, event: Event) -> Receipt | None:
    """Publish one event; None if there is no end of it."""
    receipts: list[Receipt] = []
    publishing = threading.Thread(target=lambda: receipts.append(one(sink, event)), daemon=True)
    publishing.start()
    publishing.join(60)
    return receipts[0] if receipts else None


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nx: ", b"a"),
        (b"HTTP/1.1 500 Oh\r\ntransfer-encoding: chunked\r\n\r\n", b"0"),
    ],
    ids=["continue", "header", "chunk size"],
)
def test_a_receiver_that_dribbles_for_ever_is_given_up(
    monkeypatch: pytest.MonkeyPatch, beginning: bytes, piece: bytes
) -> None:
    monkeypatch.setattr(pinned, "ANSWER_S", 0.5)
    with Endless(beginning, piece, 0.05) as sink:
        assert isinstance(in_the_end(sink, Made().event()), Unavailable)


@pytest.mark.parametrize(
    ("beginning", "piece", "receipt"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, Unavailable),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 100, Confirmed),
    ],
    ids=["continue", "trailer"],
)
def test_an_answer_that_never_ends_is_read_in_part(
    monkeypatch: pytest.MonkeyPatch, beginning: bytes, piece: bytes, receipt: type[Receipt]
) -> None:
    monkeypatch.setattr(pinned, "ANSWER_S", 600.0)
    with Endless(beginning, piece, 0) as sink:
        assert isinstance(in_the_end(sink, Made().event()), receipt)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_host_that_does_not_answer_to_a_connection_is_given_up(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Over http the queue of connections is full, over https one is taken and nothing is said."""
    monkeypatch.setattr(pinned, "CONNECT_S", 0.5)
    monkeypatch.setattr(pinned, "resolve", lambda *_, **__: ["127.0.0.1"] * 200)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0 if scheme == "http" else 500)
        for _ in range(3 if scheme == "http" else 0):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        url = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}/events"
        sink = open_sink(url, SinkContext(source=SOURCE, allow_private=True, parallel=1))
        receipt = in_the_end(sink, Made().event())
    assert isinstance(receipt, Unavailable)
    assert "cannot reach" in receipt.reason


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n",
    ],
)
def test_an_answer_that_is_none_is_unavailable_and_the_next_request_is_not_read_into_it(
    answer: bytes,
) -> None:
    with Bare(answer, b"HTTP/1.1 204 No Content\r\n\r\n") as sink:
        assert isinstance(one(sink, Made().event()), Unavailable)
        assert one(sink, Made().event()) == CONFIRMED
        sink.close()


def test_aggregates_go_in_parallel_and_each_one_waits_for_its_answers(receiver: Receiver, sink: Sink) -> None:
    together = threading.Barrier(4)
    busy: set[str] = set()
    lock = threading.Lock()
    overlaps: list[str] = []

    def answer(delivery: object) -> Answer:
        aggregate = delivery.headers["ce-partitionkey"]  # type: ignore[attr-defined]
        with lock:
            if aggregate in busy:
                overlaps.append(aggregate)
            busy.add(aggregate)
        together.wait(60)
        with lock:
            busy.discard(aggregate)
        return OK

    receiver.answer = answer
    made = Made()
    assert set(sink.publish([made.event(f"order-{i % 4}") for i in range(12)])) == {CONFIRMED}
    assert not overlaps
    assert receiver.most_together == 4


def test_nothing_more_is_sent_once_the_receiver_cannot_be_reached(receiver: Receiver) -> None:
    made = Made()
    sink = open_sink(receiver.url, SinkContext(source=SOURCE, allow_private=True, parallel=1))
    receiver.stop()
    receipts = sink.publish([made.event(f"order-{i}") for i in range(5)])
    assert isinstance(receipts[0], Unavailable)
    assert list(receipts[1:]) == [HELD] * 4


def test_no_request_begins_after_the_send_timeout(receiver: Receiver) -> None:
    sink = open_sink(receiver.url, SinkContext(source=SOURCE, allow_private=True, parallel=1, send_timeout=0))
    assert list(sink.publish([Made().event()])) == [HELD]
    assert not receiver.seen


def test_a_long_answer_is_not_read_to_its_end(receiver: Receiver, sink: Sink) -> None:
    receiver.answer = lambda _: Answer(status=400, body=b"x" * 50_000_000)
    receipt = one(sink, Made().event())
    assert isinstance(receipt, Rejected)
    assert len(receipt.reason) < 300


def test_credentials_in_the_url_are_sent_as_basic_authorization(receiver: Receiver) -> None:
    sink = open_sink(
        receiver.url.replace("//", "//shop:p%40ss@"), SinkContext(source=SOURCE, allow_private=True)
    )
    assert one(sink, Made().event()) == CONFIRMED
    sink.close()
    assert receiver.kept[0].headers["authorization"] == "Basic " + base64.b64encode(b"shop:p@ss").decode()
    assert receiver.kept[0].headers["host"] == receiver.url.split("/")[2]


def test_a_receiver_with_an_untrusted_certificate_is_not_sent_anything(receiver: Receiver) -> None:
    sink = open_sink(receiver.url.replace("http:", "https:"), SinkContext(source=SOURCE, allow_private=True))
    assert isinstance(one(sink, Made().event()), Unavailable)
    sink.close()
    assert not receiver.seen


def test_the_name_shows_no_secret() -> None:
    sink = open_sink(
        "https://user:geheim@example.org:8443/hook?token=geheim",
        SinkContext(source=SOURCE, allow_private=True),
    )
    assert sink.name == "https://example.org:8443/hook"


@pytest.mark.parametrize(
    "secret",
    ["whsec_", "whsec_%%%", "x", "abc=", "abcd", "whsec_" + "a" * 28, "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLjSw-_!?"],
)
def test_a_secret_that_is_none_is_refused_at_start(secret: str) -> None:
    with pytest.raises(ConfigError, match="secret") as refused:
        open_sink("https://example.org", SinkContext(source=SOURCE, allow_private=True, secrets=[secret]))
    assert secret == "x" or secret not in str(refused.value) or secret == "whsec_"


@pytest.mark.parametrize(
    "url",
    ["https://a..b/hook", "https://.b/hook", f"https://{'a' * 64}.b/hook", "https://b:70000/hook", "https"],
)
def test_a_host_that_no_resolver_can_be_asked_for_is_refused_at_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^sink https: "):
        open_sink(url, SinkContext(source=SOURCE))


def test_a_url_without_host_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="host"):
        open_sink("https:///hook", SinkContext(source=SOURCE, allow_private=True))
