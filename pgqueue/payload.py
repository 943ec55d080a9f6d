"""Payloads: Python values of the handler's type to JSON and back, checked on both sides.

The type is the handler's annotation: a dataclass, msgspec Struct, TypedDict, pydantic model, or anything JSON
has. msgspec does the work (https://jcristharif.com/msgspec/); pydantic models do their own. JSON only: no
pickle, no class is ever looked up by a name in a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from pgqueue.errors import BadPayload, ConfigError

LIMIT = 1024 * 1024
NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")  # MessagePack's mark of a double, and the exponent
_SURROGATE = re.compile("[\ud800-\udfff]")


def _pydantic_to_builtins(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    raise TypeError(f"{type(value).__qualname__} is not a type that JSON has")


def _pydantic_from_builtins(kind: Any, value: Any) -> Any:
    try:
        return kind.model_validate(value)
    except ValueError as error:
        raise ValueError(misfit(error)) from None


_encode = msgspec.json.Encoder(decimal_format="string", enc_hook=_pydantic_to_builtins).encode
_packed = msgspec.msgpack.Encoder(enc_hook=_pydantic_to_builtins).encode


class Codec:
    """Encodes and decodes the payloads of one name; `kind` is the annotated type (Any: no check).

    `takes_payload=False` is a handler without payload: it refuses one at enqueue, and decodes whatever a
    producer in another language sent along.
    """

    __slots__ = ("decode", "kind", "name", "takes_payload")

    #: JSON text -> value of `kind`; raises ValueError (msgspec's and pydantic's errors are ValueErrors).
    decode: Callable[[str], Any]

    def __init__(self, name: str, kind: Any = Any, *, takes_payload: bool = True) -> None:
        self.name = name
        self.kind = kind = Any if kind is object else kind
        self.takes_payload = takes_payload
        if hasattr(kind, "model_validate_json"):
            self.decode = kind.model_validate_json
            return
        try:
            strange = None if kind is Any else next(_strange(msgspec.inspect.type_info(kind), set()), None)
            self.decode = msgspec.json.Decoder(kind, dec_hook=_pydantic_from_builtins).decode
        except (TypeError, ValueError, NameError) as error:
            raise ConfigError(
                f"job {name!r}: payload type {_called(kind)} has no JSON form: {error}"
            ) from error
        if strange is not None:
            raise ConfigError(
                f"job {name!r}: payload type {_called(kind)} has no JSON form, because of {_called(strange)}"
                "; use a dataclass, msgspec Struct, TypedDict, pydantic model or plain JSON types"
            )

    def encode(self, value: Any) -> str:
        """Return the JSON text of a payload; raise BadPayload if it fits not the type, JSON or the limit."""
        if not self.takes_payload and value is not None:
            raise BadPayload(self.name, "was given, but the handler takes none; enqueue it without one")
        try:
            data = _dump(value)
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            # pydantic wraps the UnicodeEncodeError of a lone surrogate in an error of its own.
            fault = _first_fault(value) if "surrogates" in str(error) else None
            raise BadPayload(self.name, fault or f"has no JSON form: {error}") from error
        if _may_hide_nan(data, value) and (fault := _first_fault(value)):
            raise BadPayload(self.name, fault)
        if len(data) > LIMIT:
            raise BadPayload(
                self.name,
                f"has {len(data)} bytes, more than {LIMIT}: store it elsewhere and enqueue a reference",
            )
        if b"\\u0000" in data and NUL.search(data):
            raise BadPayload(
                self.name, _first_fault(value) or "holds a NUL character, which Postgres cannot store"
            )
        text = data.decode()
        if self.kind is not Any:
            try:
                self.decode(text)
            except ValueError as error:
                raise BadPayload(self.name, f"does not fit {_called(self.kind)}: {misfit(error)}") from error
        return text


def misfit(error: ValueError) -> str:
    """Say what a decoder found, and at which path; pydantic's own text would repeat the values."""
    if not hasattr(error, "errors"):
        return str(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{one['msg']} - at `{_path(one['loc'])}`" for one in found)


def _dump(value: Any) -> bytes:
    if hasattr(value, "model_dump_json"):
        text: str = value.model_dump_json(by_alias=True, round_trip=True)
        return text.encode()
    return _encode(value)


def _may_hide_nan(data: bytes, value: Any) -> bool:
    """Tell whether JSON text may stand for a value that holds NaN or infinity.

    msgspec writes them as null, in keys as "nan" and "inf", all of which may also be honest. MessagePack keeps
    them, and is written faster than a walk over the value: only what looks like one of them needs the walk.
    """
    if not (b"null" in data or b'nan"' in data or b'inf"' in data):
        return False
    try:
        return _NOT_FINITE.search(_packed(value)) is not None
    except (TypeError, ValueError, ArithmeticError):  # whole numbers beyond 64 bits, for one
        return True


def _first_fault(value: Any) -> str | None:
    """Name the first number or text that JSON in Postgres cannot hold, with its path."""
    plain = value.model_dump(by_alias=True) if hasattr(value, "model_dump") else value
    plain = msgspec.to_builtins(plain, enc_hook=_pydantic_to_builtins)
    return next(_faults(plain, ()), None)


def _faults(value: Any, path: tuple[str | int, ...]) -> Iterator[str]:
    match value:
        case float() if not math.isfinite(value):
            yield f"holds {value}, which JSON cannot hold, at `{_path(path)}`"
        case str() if "\0" in value:
            yield f"holds a NUL character, which Postgres cannot store, at `{_path(path)}`"
        case str() if _SURROGATE.search(value):
            yield f"holds a lone surrogate, which is not valid Unicode, at `{_path(path)}`"
        case dict():
            for key, inner in value.items():
                yield from _faults(key, (*path, ascii(key)[1:-1] if isinstance(key, str) else repr(key)))
                yield from _faults(inner, (*path, str(key)))
        case list() | tuple():
            for place, inner in enumerate(value):
                yield from _faults(inner, (*path, place))


def _path(parts: tuple[str | int, ...]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _strange(info: Any, seen: set[int]) -> Iterator[Any]:
    """Walk msgspec's picture of a type; give the classes that neither it nor pydantic can read from JSON."""
    if id(info) in seen:
        return
    seen.add(id(info))
    if isinstance(info, msgspec.inspect.CustomType):
        if not hasattr(info.cls, "model_validate"):
            yield info.cls
    elif isinstance(info, msgspec.Struct):
        for name in info.__struct_fields__:
            yield from _strange(getattr(info, name), seen)
    elif isinstance(info, tuple | list):
        for inner in info:
            yield from _strange(inner, seen)
    elif isinstance(info, Mapping):
        for inner in info.values():
            yield from _strange(inner, seen)


def _called(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
