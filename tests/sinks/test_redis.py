"""Redis Streams: what can go wrong with them, on a real server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis

from pgqueue.errors import ConfigError
from relay.event import Confirmed, Event, Held, Receipt, Rejected
from relay.send import send
from relay.sinks import Sink, SinkContext, SinkUnavailable, open_sink
from tests.sinks.broker_rigs import RedisRig
from tests.sinks.brokers import Broker, Redis
from tests.sinks.events import SOURCE, attempt
from tests.sinks.ordeal import endure, network_faults, restart
from tests.waiting import eventually

LATER = float("inf")


@pytest.fixture
def client(redis_rig: RedisRig) -> Iterator[redis.Redis]:
    """Give a client whose settings of the server are undone at the end."""
    with redis_rig.client() as made:
        yield made
        made.config_set("maxmemory", 0)
        made.replicaof("NO", "ONE")


def test_an_entry_carries_the_attributes_as_fields(redis_rig: RedisRig) -> None:
    redis_rig.sink.publish([redis_rig.event("order-7", '{"id": 7}')])
    (fields,) = redis_rig.entries()
    assert fields == {
        "specversion": "1.0",
        "id": "outbox:1",
        "source": SOURCE,
        "type": "order.placed",
        "time": "2030-01-02T03:04:05.000000Z",
        "datacontenttype": "application/json",
        "subject": "order/order-7",
        "partitionkey": "order-7",
        "sequence": "0000000000000000001",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "data": '{"id": 7}',
    }


def test_a_place_in_the_stream_is_filled_from_the_event(redis_rig: RedisRig) -> None:
    url = f"redis://127.0.0.1:{redis_rig.broker.port}/0?stream={redis_rig.name}:{{aggregate_type}}:{{event_type}}"
    sink = open_sink(url, SinkContext(source=SOURCE))
    assert sink.publish([redis_rig.event(event_type="order.paid")]) == [Confirmed()]
    assert len(redis_rig.entries(f"{redis_rig.name}:order:order.paid")) == 1
    sink.close()


@pytest.mark.parametrize(
    ("stream", "ordered"),
    [
        ("s", True),
        ("s:{part}", True),
        ("s:{aggregate_id}", True),
        ("s:{event_type}", False),
        ("{aggregate_type}", False),
    ],
)
def test_a_sink_keeps_the_order_itself_where_an_aggregate_has_one_stream(stream: str, ordered: bool) -> None:
    sink = open_sink(f"redis://h/0?stream={stream}", SinkContext(source=SOURCE))
    assert sink.ordered is ordered


def test_a_server_out_of_memory_is_away_and_adds_nothing_of_the_batch(
    redis_rig: RedisRig, client: redis.Redis
) -> None:
    events = [redis_rig.event("order-1") for _ in range(3)]
    client.config_set("maxmemory", 1)
    with pytest.raises(SinkUnavailable, match=r"OOM|memory"):
        redis_rig.sink.publish(events)
    client.config_set("maxmemory", 0)
    assert not redis_rig.arrived()
    assert redis_rig.sink.publish(events) == [Confirmed()] * 3


def test_a_replica_that_takes_no_writes_is_away(redis_rig: RedisRig, client: redis.Redis) -> None:
    client.replicaof("127.0.0.1", 1)
    with pytest.raises(SinkUnavailable, match=r"read only|READONLY"):
        redis_rig.sink.publish([redis_rig.event()])
    client.replicaof("NO", "ONE")
    assert redis_rig.sink.publish([redis_rig.event()]) == [Confirmed()]


def test_a_key_that_is_no_stream_stops_its_events_and_no_others(
    redis_rig: RedisRig, client: redis.Redis
) -> None:
    client.set(f"{redis_rig.name}:broken", "text")
    url = f"redis://127.0.0.1:{redis_rig.broker.port}/0?stream={redis_rig.name}:{{event_type}}"
    sink = open_sink(url, SinkContext(source=SOURCE))
    broken, behind = redis_rig.event("a", event_type="broken"), redis_rig.event("a", event_type="whole")
    other = redis_rig.event("b", event_type="whole")
    sent = send(sink, [broken, behind, other], deadline=LATER)
    assert sent.confirmed == [other.id]
    assert not sent.rejected
    assert "WRONGTYPE" in sent.unanswered[broken.id].reason
    sink.close()


def test_an_event_over_the_limit_is_refused_before_anything_of_its_aggregate_is_sent(
    redis_rig: RedisRig,
) -> None:
    events = [
        redis_rig.event("a"),
        redis_rig.event("a", bad=True),
        redis_rig.event("a"),
        redis_rig.event("b"),
    ]
    first, refused, behind, other = redis_rig.sink.publish(events)
    assert (first, behind, other) == (Confirmed(), Held(), Confirmed())
    assert isinstance(refused, Rejected)
    assert "1100000" in refused.reason
    assert [a.key for a in redis_rig.arrived()] == ["outbox:1", "outbox:4"]


def test_a_stream_is_trimmed_to_about_maxlen(redis_rig: RedisRig) -> None:
    sink = redis_rig.open(more="&maxlen=100")
    events = [redis_rig.event(str(i)) for i in range(1000)]
    assert sink.publish(events) == [Confirmed()] * 1000
    assert 100 <= len(redis_rig.entries()) < 300
    sink.close()


@pytest.fixture
def replicated(redis_rig: RedisRig, client: redis.Redis, tmp_path: Path) -> Iterator[tuple[Sink, Replica]]:
    """Give a sink that wants one replica, and a replica that has all."""
    sink = redis_rig.open(send_timeout=8.0, more="&replicas=1", direct=True)
    replica = Replica(redis_rig.broker, tmp_path)
    replica.start()
    try:
        eventually(lambda: attempt(sink, redis_rig.event()) == Confirmed())
        yield sink, replica
    finally:
        replica.kill()
        sink.close()


def test_nothing_is_added_while_too_few_replicas_are_connected(redis_rig: RedisRig) -> None:
    sink = redis_rig.open(send_timeout=1.0, more="&replicas=1", direct=True)
    event = redis_rig.event()

    def too_few() -> bool:
        with pytest.raises(SinkUnavailable) as away:
            sink.publish([event])
        return "0 of 1 replicas" in str(away.value)

    eventually(too_few)
    assert redis_rig.entries() == []
    sink.close()


def test_what_a_late_replica_does_not_have_is_added_once_and_confirmed_when_it_has_it(
    redis_rig: RedisRig, replicated: tuple[Sink, Replica]
) -> None:
    sink, replica = replicated
    before = len(redis_rig.entries())
    events = [redis_rig.event(), redis_rig.event("other")]
    replica.pause()
    for _ in range(3):
        with pytest.raises(SinkUnavailable, match="0 of 1 replicas have the entries"):
            sink.publish(events)
        sink.close()
    replica.go_on()
    more = redis_rig.event()
    eventually(lambda: attempts(sink, [*events, more]) == [Confirmed()] * 3)
    assert [entry["id"] for entry in redis_rig.entries()][before:] == [
        event.idempotency_key for event in [*events, more]
    ]


def test_what_a_replica_did_not_have_is_added_again_where_the_history_is_another(
    redis_rig: RedisRig, client: redis.Redis, replicated: tuple[Sink, Replica]
) -> None:
    sink, replica = replicated
    before = len(redis_rig.entries())
    event = redis_rig.event()
    replica.pause()
    with pytest.raises(SinkUnavailable, match="0 of 1 replicas have the entries"):
        sink.publish([event])
    client.replicaof("127.0.0.1", 1)
    client.replicaof("NO", "ONE")
    replica.go_on()
    eventually(lambda: attempt(sink, event) == Confirmed())
    assert len(redis_rig.entries()) == before + 2


def test_a_frozen_server_is_given_up_within_the_send_timeout(redis_rig: RedisRig) -> None:
    sink = redis_rig.open(send_timeout=0.5)
    event = redis_rig.event()
    eventually(lambda: attempt(sink, event) == Confirmed())
    redis_rig.proxy.freeze()
    with pytest.raises(SinkUnavailable, match=r"[Tt]ime"):
        sink.publish([event])
    redis_rig.proxy.heal()
    eventually(lambda: attempt(sink, event) == Confirmed())
    sink.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h/0", "stream"),
        ("redis://h/first?stream=s", "no database number"),
        ("redis://h/0?stream={kind}", "{kind}"),
        ("redis://h/0?stream=s&maxlen=many", "maxlen=many"),
        ("redis://h/0?stream=s&max_len=5", "max_len"),
        ("redis:///0?stream=s", "no host"),
        ("redis://h,i/0?stream=s", "several hosts"),
    ],
)
def test_a_url_that_says_too_little_or_too_much_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_sink(url, SinkContext(source=SOURCE))


def test_no_name_and_no_error_shows_the_password(redis_rig: RedisRig) -> None:
    url = f"redis://someone:geheim@127.0.0.1:{redis_rig.broker.port}/0?stream=s"
    sink = open_sink(url, SinkContext(source=SOURCE))
    assert "geheim" not in sink.name
    with pytest.raises(SinkUnavailable) as caught:
        sink.publish([redis_rig.event()])
    assert "geheim" not in str(caught.value)


def test_nothing_is_lost_or_inverted_under_network_faults_and_a_killed_server(
    redis_rig: RedisRig, dsn: str
) -> None:
    endure(redis_rig, dsn, [*network_faults(redis_rig), restart(redis_rig)])


def attempts(sink: Sink, events: list[Event]) -> Sequence[Receipt]:
    """Publish events; while the sink is away there is no answer."""
    try:
        return sink.publish(events)
    except SinkUnavailable:
        return []


class Replica(Redis):
    """A replica of another server."""

    def __init__(self, of: Broker, folder: Path) -> None:
        super().__init__(folder)
        self._of = of

    def command(self) -> list[str]:
        """Return the command line."""
        return [*super().command(), "--replicaof", "127.0.0.1", str(self._of.port)]
