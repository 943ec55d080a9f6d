"""Which addresses belong to the public internet, so that a target's name cannot lead into the operator's own network.

The blocks are those of the IANA special-purpose registries (https://www.iana.org/assignments/iana-ipv4-special-registry
and -ipv6-), fixed here because what `ipaddress` calls global differs between versions of Python.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from pgqueue.errors import PgqueueError

Address = IPv4Address | IPv6Address

_NOT_PUBLIC_4: Final = [
    ip_network(block)
    for block in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
    )
]  # fmt: skip
#: Unicast that is routed at all; loopback, unique local, link-local and multicast addresses lie outside.
_PUBLIC_6: Final = IPv6Network("2000::/3")
_NOT_PUBLIC_6: Final = [
    IPv6Network(block) for block in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]
#: IPv4 in the last 32 bits: mapped, and what a NAT64 gateway translates.
_CARRY_4: Final = [IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")]


class NotPublic(PgqueueError):
    """A target's name leads to an address that is not of the public internet."""

    def __init__(self, host: str, address: Address) -> None:
        self.host = host
        self.address = address
        super().__init__(
            f"{host} is at {address}, which is not of the public internet; if it is meant, start the relay with "
            "--allow-private"
        )


def is_public(address: Address) -> bool:
    """Tell whether an address is of the public internet, whatever form it is written in."""
    if isinstance(address, IPv4Address):
        return not any(address in block for block in _NOT_PUBLIC_4)
    if any(address in block for block in _CARRY_4):
        return is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
    return address in _PUBLIC_6 and not any(address in block for block in _NOT_PUBLIC_6)


def is_name(host: str) -> bool:
    """Tell whether a resolver can be asked for a host: no label of its name is empty or too long."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def literal(host: str) -> Address | None:
    """Return the address that a host is if it is no name."""
    try:
        return ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


def resolve(host: str, port: int, *, allow_private: bool) -> list[str]:
    """Ask the resolver once; return every address of a host, to be connected to as it stands.

    Raises NotPublic if one of them is not public: which one a connection would take is not for us to guess.
    Raises OSError if there is none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in found))
    if not allow_private:
        for address in addresses:
            known = literal(address)
            if known is None or "%" in address or not is_public(known):
                raise NotPublic(host, known or IPv4Address(0))
    return addresses
