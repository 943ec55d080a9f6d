"""Payloads: Python values of the handler's type to JSON and back, checked on both sides.

The type is the handler's annotation: a dataclass, msgspec Struct, TypedDict, pydantic model, or anything JSON
has. msgspec does the work (https://jcristharif.com/msgspec/); pydantic models do their own. JSON only: no
pickle, no class is ever looked up by a name in a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    __slots__ = ("_compares", "_decode_all", "decode", "kind", "name", "takes_payload")

    #: JSON text -> value of `kind`; raises ValueError (msgspec's and pydantic's errors are ValueErrors).
    decode: Callable[[str], Any]

    def __init__(self, name: str, kind: Any = Any, *, takes_payload: bool = True) -> None:
        self.name = name
        self.kind = kind = Any if kind is object else kind
        self.takes_payload = takes_payload
        self._decode_all: Callable[[str], Any] | None = None
        self._compares = False
        if hasattr(kind, "model_validate_json"):
            self.decode = kind.model_validate_json
            return
        try:
            parts = [] if kind is Any else list(_parts(msgspec.inspect.type_info(kind), set()))
            strange = next((part.cls for part in parts if _is_strange(part)), None)
            self._compares = (
                bool(parts)
                and isinstance(parts[0], msgspec.inspect.StructType)
                and not any(map(_has_own_eq, parts))
            )
            self.decode = msgspec.json.Decoder(kind, dec_hook=_pydantic_from_builtins).decode
            if kind is not Any and takes_payload:
                self._decode_all = msgspec.json.Decoder(list[kind], dec_hook=_pydantic_from_builtins).decode
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

    def encode_all(self, values: Sequence[Any]) -> str:
        """Return the JSON array of the payloads; raise BadPayload for the first that `encode` refuses."""
        if self._decode_all is not None and len(values) > 1:
            text = self._all_at_once(values, self._decode_all)
            if text is not None:
                return text
        return f"[{','.join(map(self.encode, values))}]"

    def _all_at_once(self, values: Sequence[Any], check: Callable[[str], Any]) -> str | None:
        """Encode and check the payloads as one array, in less than a quarter of the time; None if there is any doubt.

        A NaN was written as null, and is equal to nothing that is read back: where values are compared faster than
        text is searched, those that are equal hold none.
        """
        try:
            data = _encode(values)
            if (len(data) > LIMIT and max(map(len, map(_encode, values))) > LIMIT) or (
                b"\\" in data and b"\\u0000" in data
            ):
                return None
            text = data.decode()
            read = check(text)
            if (
                not (self._compares and read == values)
                and _marks_nan(data)
                and any(_may_hide_nan(_encode(value), value) for value in values)
            ):
                return None
        except (TypeError, ValueError, ArithmeticError, RecursionError):
            return None
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
    if not _marks_nan(data):
        return False
    try:
        return _NOT_FINITE.search(_packed(value)) is not None
    except (TypeError, ValueError, ArithmeticError):  # whole numbers beyond 64 bits, for one
        return True


def _marks_nan(data: bytes) -> bool:
    return b"null" in data or b'nan"' in data or b'inf"' in data


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


def _parts(info: Any, seen: set[int]) -> Iterator[Any]:
    """Walk msgspec's picture of a type: it, and all that it is made of."""
    if id(info) in seen:
        return
    seen.add(id(info))
    if isinstance(info, msgspec.inspect.Type):
        yield info
    if isinstance(info, msgspec.Struct):
        for name in info.__struct_fields__:
            yield from _parts(getattr(info, name), seen)
    elif isinstance(info, tuple | list):
        for inner in info:
            yield from _parts(inner, seen)
    elif isinstance(info, Mapping):
        for inner in info.values():
            yield from _parts(inner, seen)


def _is_strange(info: Any) -> bool:
    """Tell whether it is a class that neither msgspec nor pydantic can read from JSON."""
    return isinstance(info, msgspec.inspect.CustomType) and not hasattr(info.cls, "model_validate")


def _has_own_eq(info: Any) -> bool:
    """Tell whether it is a class that may call values equal that are not."""
    match info:
        case msgspec.inspect.StructType():
            return info.cls.__eq__ is not msgspec.Struct.__eq__
        case msgspec.inspect.DataclassType() | msgspec.inspect.CustomType():
            return True
    return False


def _called(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
