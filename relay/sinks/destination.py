"""Where in a broker an event goes: a sink URL's options, and names with places for what the event says.

    kafka://host/shop.{aggregate_type}      nats://host/shop.{event_type}.{aggregate_id}

Known places are {event_type}, {aggregate_type}, {aggregate_id} and {part} (the number of the outbox partition).
What an event lacks is written as an empty text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from pgqueue.errors import ConfigError
from relay.event import Event
from relay.sinks.addresses import is_name

_PLACE = re.compile(r"\{([^{}]*)\}")

_READ: Final[Mapping[str, Callable[[Event], str]]] = {
    "event_type": lambda event: event.event_type,
    "aggregate_type": lambda event: event.aggregate_type or "",
    "aggregate_id": lambda event: event.aggregate_id or "",
    "part": lambda event: str(event.part),
}

Escape = Callable[[str, str], str]


class Destination:
    """A name with places. `escape(place, value)` says how a value stands in it.

    `fixed` if it has no place at all; `per_aggregate` if all events of one aggregate get the same name.
    """

    __slots__ = ("_escape", "_places", "fixed", "per_aggregate", "text")

    def __init__(self, sink: str, text: str, escape: Escape = lambda _, value: value) -> None:
        self.text = text
        self._escape = escape
        self._places = list(dict.fromkeys(_PLACE.findall(text)))
        if unknown := [place for place in self._places if place not in _READ]:
            known = ", ".join(f"{{{place}}}" for place in _READ)
            raise ConfigError(f"sink {sink}: {{{unknown[0]}}} is no place in {text!r}; known are {known}")
        self.fixed = not self._places
        self.per_aggregate = {"aggregate_id", "part"}.issuperset(self._places)

    def of(self, event: Event) -> str:
        """Return the name for an event."""
        if self.fixed:
            return self.text
        values = {place: self._escape(place, _READ[place](event)) for place in self._places}
        return _PLACE.sub(lambda found: values[found[1]], self.text)


class Address:
    """A sink URL taken apart. `shown` is the URL without account, password and options."""

    __slots__ = ("hosts", "options", "password", "path", "scheme", "shown", "user")

    def __init__(self, url: str, *, port: int, known: Sequence[str] | None) -> None:
        parts = urlsplit(url)
        account, _, places = parts.netloc.rpartition("@")
        user, _, password = account.partition(":")
        self.scheme = parts.scheme or url.lower()  # no colon: the whole is the scheme
        self.user = unquote(user) or None
        self.password = unquote(password) or None
        self.hosts = [_host(parts.scheme, place, port) for place in places.split(",") if place]
        self.path = unquote(parts.path.removeprefix("/"))
        self.shown = f"{parts.scheme}://{places}{parts.path}"
        if not self.hosts:
            raise ConfigError(f"sink {self.scheme}: has no host; write {self.scheme}://host/..")
        self.options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if known is not None and (unknown := self.options.keys() - set(known)):
            raise ConfigError(
                f"sink {self.shown} has no option {min(unknown)!r}; known are {', '.join(sorted(known))}"
            )

    def number(self, option: str, default: int) -> int:
        """Return an option that is a whole number of at least 1."""
        text = self.options.get(option)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or int(text) < 1:
            raise ConfigError(f"sink {self.shown}: {option}={text} is not a number of at least 1")
        return int(text)

    def flag(self, option: str, *, default: bool) -> bool:
        """Return an option that is true or false."""
        text = self.options.get(option, str(default)).lower()
        if text not in ("true", "false"):
            raise ConfigError(f"sink {self.shown}: {option}={text} is neither true nor false")
        return text == "true"


def _host(scheme: str, place: str, port: int) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?", place)
    if found is None or int(found[2] or port) > 65_535 or not is_name(found[1].strip("[]")):
        raise ConfigError(f"sink {scheme}: {place!r} is not host:port")
    return found[1].strip("[]"), int(found[2] or port)
