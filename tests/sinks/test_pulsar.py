"""Pulsar: what a message carries, what can go wrong with the broker, and the network between."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("pulsar", reason="broker: no Pulsar client; install the Python package pulsar-client")

from relay.event import Confirmed, Rejected, Unavailable
from relay.sinks import SinkContext, SinkUnavailable, open_sink
from tests.sinks.broker_rigs import SEND_S
from tests.sinks.events import SOURCE, Made, attempt
from tests.sinks.ordeal import endure, network_faults, restart
from tests.sinks.pulsar_rigs import PulsarRig
from tests.waiting import eventually

PUBLISHES = """\
import sys
from relay.sinks import SinkContext, open_sink
from tests.sinks.events import Made
sink = open_sink(sys.argv[1], SinkContext(source="/s", send_timeout=30))
assert sink.publish([Made().event()])
raise SystemExit(3)
"""


def test_a_message_carries_the_attributes_as_properties_and_the_aggregate_as_key(
    pulsar_rig: PulsarRig,
) -> None:
    event = pulsar_rig.event(payload='{"n": 1.0}')
    assert pulsar_rig.sink.publish([event]) == [Confirmed()]
    (message,) = pulsar_rig.messages()
    assert message.data() == b'{"n": 1.0}'
    assert message.partition_key() == "order-1"
    assert message.properties() == {
        "ce_specversion": "1.0",
        "ce_id": event.idempotency_key,
        "ce_source": SOURCE,
        "ce_type": "order.placed",
        "ce_time": "2030-01-02T03:04:05.000000Z",
        "ce_subject": "order/order-1",
        "ce_partitionkey": "order-1",
        "ce_sequence": f"{event.id:019}",
        "ce_traceparent": event.headers["traceparent"],
        "content-type": "application/json",
    }


def test_a_place_in_the_topic_is_filled_from_the_event(pulsar_rig: PulsarRig) -> None:
    sink = at(pulsar_rig, f"{pulsar_rig.name}-{{event_type}}")
    events = [pulsar_rig.event(event_type=kind) for kind in ("order.placed", "a/b")]
    assert sink.publish(events) == [Confirmed()] * 2
    sink.close()
    assert len(pulsar_rig.messages(f"{pulsar_rig.name}-order.placed")) == 1
    assert len(pulsar_rig.messages(f"{pulsar_rig.name}-a%2Fb")) == 1


def test_a_namespace_that_is_not_there_is_waited_for(pulsar_rig: PulsarRig) -> None:
    sink = open_sink(
        f"pulsar://127.0.0.1:{pulsar_rig.broker.port}/public/nowhere/orders", SinkContext(source=SOURCE)
    )
    with pytest.raises(SinkUnavailable, match="TopicNotFound"):
        sink.publish([pulsar_rig.event()])
    sink.close()


def test_a_message_over_the_brokers_limit_is_refused_and_the_others_pass(pulsar_rig: PulsarRig) -> None:
    sink = at(pulsar_rig, f"{pulsar_rig.name}?max_bytes=100000000")
    large = Made.event(pulsar_rig, "order-2", f'"{"x" * 6_000_000}"')
    receipts = sink.publish([pulsar_rig.event(), large, pulsar_rig.event("order-3")])
    sink.close()
    assert [type(receipt) for receipt in receipts] == [Confirmed, Rejected, Confirmed]


def test_a_frozen_broker_is_given_up_within_the_send_timeout(pulsar_rig: PulsarRig) -> None:
    sink = pulsar_rig.open(send_timeout=1.0)
    event = pulsar_rig.event()
    eventually(lambda: attempt(sink, event) == Confirmed())
    pulsar_rig.proxy.freeze()
    assert isinstance(attempt(sink, event), Unavailable)
    pulsar_rig.proxy.heal()
    eventually(lambda: attempt(sink, event) == Confirmed())
    sink.close()


def test_the_client_writes_nothing_to_stdout_even_as_the_process_ends(pulsar_rig: PulsarRig) -> None:
    url = pulsar_rig.url(pulsar_rig.broker.port)
    done = subprocess.run([sys.executable, "-c", PUBLISHES, url], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_nothing_is_lost_or_inverted_under_network_faults_and_a_killed_broker(
    pulsar_rig: PulsarRig, dsn: str
) -> None:
    endure(pulsar_rig, dsn, [*network_faults(pulsar_rig), restart(pulsar_rig)], drain_s=60)


def at(rig: PulsarRig, topic: str) -> Any:
    """Return a sink for another topic of the same broker."""
    url = f"pulsar://127.0.0.1:{rig.broker.port}/public/default/{topic}"
    return open_sink(url, SinkContext(source=SOURCE, send_timeout=SEND_S))
