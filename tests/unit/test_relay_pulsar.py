"""The Pulsar sink, as far as it goes without a broker."""

from __future__ import annotations

import pytest

pytest.importorskip("pulsar", reason="broker: no Pulsar client; install the Python package pulsar-client")

from pgqueue.errors import ConfigError
from relay.event import Rejected
from relay.sinks import Sink, SinkContext, SinkUnavailable, open_sink
from tests.sinks.brokers import free_port
from tests.sinks.events import SOURCE, Made


def opened(url: str) -> Sink:
    """Return the sink of a URL."""
    return open_sink(url, SinkContext(source=SOURCE, send_timeout=1.0))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("pulsar://host", "no topic"),
        ("pulsar://host/a/b", "no topic"),
        ("pulsar://host/a//b", "no topic"),
        ("pulsar://host/orders?color=red", "color"),
        ("pulsar://host/{color}", "color"),
        ("pulsar:///orders", "no host"),
    ],
)
def test_a_url_that_names_no_topic_is_refused_at_start(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(url)


def test_the_name_shows_no_token() -> None:
    assert opened("pulsar+ssl://:geheim@host/orders").name == "pulsar+ssl://host/orders"


@pytest.mark.slow
def test_a_broker_that_is_away_is_unavailable_and_what_is_too_large_is_rejected() -> None:
    made = Made()
    sink = opened(f"pulsar://127.0.0.1:{free_port()}/orders?max_bytes=10")
    (receipt,) = sink.publish([made.event(payload='"longer than that"')])
    assert isinstance(receipt, Rejected)
    with pytest.raises(SinkUnavailable):
        sink.publish([made.event()])
    sink.close()
