"""Payloads: Python values of the handler's type to JSON and back, checked on both sides.

The type is the handler's annotation: a dataclass, msgspec Struct, TypedDict, pydantic model, or anything JSON
has. msgspec does the work (https://jcristharif.com/msgspec/); pydantic models do their own. JSON only: no pickle,
no class is ever looked up by a name in a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from pgqueue.errors import BadPayload, ConfigError

LIMIT = 1024 * 1024
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_encode = msgspec.json.Encoder(decimal_format="string").encode


class Codec:
    """Encodes and decodes the payloads of one name; `kind` is the annotated type (Any: no check)."""

    __slots__ = ("decode", "kind", "name")

    #: JSON text -> value of `kind`; raises ValueError (msgspec's and pydantic's errors are ValueErrors).
    decode: Callable[[str], Any]

    def __init__(self, name: str, kind: Any = Any) -> None:
        self.name = name
        self.kind = kind
        if hasattr(kind, "model_validate_json"):
            self.decode = kind.model_validate_json
            return
        try:
            self.decode = msgspec.json.Decoder(kind).decode
        except (TypeError, ValueError) as error:
            raise ConfigError(f"job {name!r}: payload type {kind!r} has no JSON form: {error}") from error

    def encode(self, value: Any) -> str:
        """Return the JSON text of a payload; raise BadPayload if it does not fit the type, JSON or the limit."""
        try:
            if hasattr(value, "model_dump_json"):
                data = value.model_dump_json().encode()
            else:
                data = _encode(value)
                if b"null" in data:  # msgspec writes NaN and infinity as null; None is null too, so look closer
                    json.dumps(msgspec.to_builtins(value, str_keys=True), allow_nan=False)
        except (TypeError, ValueError, UnicodeError, RecursionError) as error:
            raise BadPayload(self.name, f"has no JSON form: {error}") from error
        if len(data) > LIMIT:
            raise BadPayload(
                self.name, f"has {len(data)} bytes, more than {LIMIT}: store it elsewhere and enqueue a reference"
            )
        if b"\\u0000" in data and _NUL.search(data):
            raise BadPayload(self.name, "contains a NUL character (\\u0000), which Postgres cannot store")
        if self.kind is not Any:
            try:
                self.decode(data.decode())
            except ValueError as error:
                raise BadPayload(self.name, f"does not fit {getattr(self.kind, '__name__', self.kind)}: {error}") from error
        return data.decode()
