"""Webhooks go to the public internet, whatever form an address is written in, unless the operator says otherwise."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import Any

import pytest

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Unavailable
from relay.sinks import SinkContext, addresses, open_sink
from relay.sinks.addresses import NotPublic, is_public, literal, resolve
from tests.sinks.events import SOURCE, Made
from tests.sinks.receiver import Receiver

INSIDE = [
    "0.0.0.0", "0.1.2.3",  # noqa: S104 - not bound to
    "10.0.0.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.255.254",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.168.1.1", "198.18.0.1",
    "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1",
    "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::",
    "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1",
]  # fmt: skip
OUTSIDE = [
    "1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "172.15.0.1", "172.32.0.1", "192.169.0.1",
    "223.255.255.255", "2606:4700::1111", "2a00:1450:4001:80b::200e", "::ffff:8.8.8.8", "64:ff9b::808:808",
]  # fmt: skip


def answers(monkeypatch: pytest.MonkeyPatch, *found: str) -> list[str]:
    """Let the resolver give these answers; return a list of the names that it was asked for."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        if literal(host) is not None:
            return real(host, port, *args, **options)
        asked.append(host)
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port))
            for a in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.parametrize("address", INSIDE)
def test_an_address_inside_is_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", OUTSIDE)
def test_an_address_outside_is_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "found", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["8.8.8.8", "::1"], ["fe80::1%eth0"]]
)
def test_one_address_inside_refuses_the_name_unless_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, found: list[str]
) -> None:
    answers(monkeypatch, *found)
    with pytest.raises(NotPublic, match="--allow-private"):
        resolve("innocent.example", 443, allow_private=False)
    assert resolve("innocent.example", 443, allow_private=True) == found


def test_a_name_with_public_addresses_only_is_taken_as_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "8.8.8.8", "2606:4700::1111", "8.8.8.8")
    assert resolve("example.org", 443, allow_private=False) == ["8.8.8.8", "2606:4700::1111"]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "169.254.169.254", "[::ffff:10.0.0.1]"])
def test_a_literal_inside_address_is_refused_at_start(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-private"):
        open_sink(f"https://{host}/hook", SinkContext(source=SOURCE))


@pytest.mark.parametrize("host", ["localhost", "2130706433", "0x7f.1", "127.1"])
def test_a_name_that_leads_inside_is_sent_nothing_and_rejects_no_event(host: str) -> None:
    made = Made()
    with Receiver() as receiver:
        port = receiver.url.split(":")[2]
        sink = open_sink(f"http://{host}:{port}", SinkContext(source=SOURCE, parallel=1))
        first, second = sink.publish([made.event("a"), made.event("b")])
        sink.close()
        assert isinstance(first, Unavailable)
        assert second == HELD
        assert not receiver.seen


def test_a_connection_goes_to_the_address_that_was_checked_and_keeps_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Receiver() as receiver:
        port = receiver.url.split(":")[2].split("/")[0]
        asked = answers(monkeypatch, "127.0.0.1")
        sink = open_sink(f"http://shop.example:{port}/hook", SinkContext(source=SOURCE, allow_private=True))
        made = Made()
        assert list(sink.publish([made.event("a"), made.event("a")])) == [CONFIRMED] * 2
        sink.close()
        assert asked.count("shop.example") == 1
        assert receiver.kept[0].headers["host"] == f"shop.example:{port}"


def test_a_second_answer_of_the_resolver_is_checked_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as receiver:
        port = receiver.url.split(":")[2].split("/")[0]
        monkeypatch.setattr(addresses, "is_public", lambda address: str(address) == "127.0.0.1")
        answers(monkeypatch, "127.0.0.1")
        sink = open_sink(f"http://rebinding.example:{port}", SinkContext(source=SOURCE))
        made = Made()
        assert list(sink.publish([made.event("a")])) == [CONFIRMED]
        sink.close()
        answers(monkeypatch, "127.0.0.2")
        (receipt,) = sink.publish([made.event("a")])
        sink.close()
        assert isinstance(receipt, Unavailable)
        assert "127.0.0.2" in receipt.reason
        assert len(receiver.seen) == 1
