from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue import BadPayload, ConfigError
from pgqueue.payload import LIMIT, Codec


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Line:
    sku: str
    price: Decimal


@dataclass
class Order:
    id: UUID
    at: datetime
    day: date
    lines: list[Line]
    colour: Colour = Colour.RED
    took: timedelta = timedelta()
    note: str | None = None
    parent: Order | None = None


class Receipt(msgspec.Struct, frozen=True):
    order_id: int
    mail: str = ""


class Address(TypedDict):
    street: str
    floor: NotRequired[int]


class Invoice(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    number: int
    total: float | None = None
    paid_by: str | None = pydantic.Field(default=None, alias="paidBy")


@dataclass
class Basket:
    invoices: list[Invoice] = field(default_factory=list)


class Opaque:
    pass


@dataclass
class Hidden:
    inner: dict[str, Opaque]


ORDER = Order(
    id=UUID(int=7),
    at=datetime(2026, 3, 29, 2, 30, tzinfo=timezone(timedelta(hours=3))),
    day=date(2026, 3, 29),
    lines=[Line(sku="a\\b\"'; DROP TABLE x; --", price=Decimal("0.10"))],
    took=timedelta(seconds=1.5),
)


#: A type that takes whatever JSON has, and is checked as a type is.
Anything = Any | None


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Order, ORDER),
        (Order, Order(id=UUID(int=1), at=ORDER.at, day=ORDER.day, lines=[], parent=ORDER)),
        (Receipt, Receipt(order_id=1)),
        (Receipt, Receipt(order_id=2**63 - 1, mail="Zoë 🦆")),
        (Address, {"street": "x"}),
        (Address, {"street": "x", "floor": 3}),
        (Invoice, Invoice(number=1, total=0.5, paidBy="card")),
        (Invoice | None, Invoice(number=1)),
        (Invoice | None, None),
        (Basket, Basket(invoices=[Invoice(number=1), Invoice(number=2, paidBy="cash")])),
        (list[Invoice], [Invoice(number=1)]),
        (Receipt | None, None),
        (int, 5),
        (int, 2**70),
        (int | str, "a"),
        (float, 0.1),
        (bool, False),
        (str, ""),
        (None, None),
        (datetime, ORDER.at),
        (Decimal, Decimal("1.000")),
        (Colour, Colour.RED),
        (Literal["a", "b"], "b"),
        (Annotated[int, msgspec.Meta(ge=0)], 0),
        (tuple[int, str], (1, "a")),
        (set[int], {1, 2}),
        (bytes, b"\x00\xff"),
        (dict[int, Receipt], {1: Receipt(order_id=1)}),
        (Any, {"nan": None, "a": [1, None, "null", "inf"]}),
        (object, [1, "2"]),
        (Any, "\\u0000 is text, and so is \\\\u0000"),
    ],
)
def test_what_is_encoded_is_what_the_handler_gets(kind: Any, value: Any) -> None:
    codec = Codec("ship", kind)
    text = codec.encode(value)
    json.loads(text)
    assert codec.decode(text) == value
    assert codec.encode_all([value, value]) == f"[{text},{text}]"


def test_a_plain_dict_that_fits_is_as_good_as_the_type() -> None:
    assert Codec("ship", Receipt).encode({"order_id": 1}) == '{"order_id":1}'


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.text(st.characters(codec="ascii", min_codepoint=1)), inner)
        ),
        max_leaves=20,
    )
)
def test_every_json_value_passes_unchanged(value: Any) -> None:
    codec = Codec("ship")
    assert codec.decode(codec.encode(value)) == value


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (Receipt, {"order_id": "1"}, "Receipt: Expected `int`, got `str` - at `$.order_id`"),
        (Receipt, {}, "missing required field `order_id`"),
        (Receipt, None, "Receipt: Expected `object`, got `null`"),
        (Order, {"id": "no", "at": "x"}, "Invalid UUID - at `$.id`"),
        (Address, {"street": 1}, "at `$.street`"),
        (list[Receipt], [{"order_id": 1}, {}], "at `$[1]`"),
        (Annotated[int, msgspec.Meta(ge=0)], -1, "Expected `int` >= 0"),
        (Colour, "blue", "Invalid enum value 'blue'"),
        (Invoice, {"number": "x", "total": []}, "at `$.number`"),
        (Invoice, None, "Invoice: Input should be an object - at `$`"),
        (list[Invoice], [{"number": "x"}], "at `$[0]`"),
        (datetime, "yesterday", "Invalid RFC3339"),
    ],
)
def test_a_misfit_names_the_job_the_type_and_the_path(kind: Any, value: Any, says: str) -> None:
    with pytest.raises(BadPayload) as caught:
        Codec("ship", kind).encode(value)
    assert caught.value.name == "ship"
    assert str(caught.value).startswith("payload of 'ship': does not fit ")
    assert says in str(caught.value)
    with pytest.raises(BadPayload) as among_others:
        Codec("ship", kind).encode_all([value, value])
    assert str(among_others.value) == str(caught.value)


def test_a_misfit_of_pydantic_does_not_repeat_the_values() -> None:
    for kind, value in ((Invoice, {"number": "secret"}), (list[Invoice], [{"number": "secret"}])):
        with pytest.raises(BadPayload) as caught:
            Codec("ship", kind).encode(value)
        assert "secret" not in str(caught.value)


NUL, LONE = (
    "holds a NUL character, which Postgres cannot store, at ",
    "holds a lone surrogate, which is not valid Unicode, at ",
)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a\0b", NUL + "`$`"),
        ({"a": [1, {"b": "\0"}]}, NUL + "`$.a[1].b`"),
        ({"a": {"k\0": 1}}, NUL + "`$.a.k\\x00`"),
        ("\\\0", NUL + "`$`"),
        ("\ud800", LONE + "`$`"),
        (["x", "ok \udfff"], LONE + "`$[1]`"),
        ({"\ud800": 1}, LONE + "`$.\\ud800`"),
        (math.nan, "holds nan, which JSON cannot hold, at `$`"),
        ({"a": [0.5, -math.inf]}, "holds -inf, which JSON cannot hold, at `$.a[1]`"),
        ({math.nan: 1}, "holds nan, which JSON cannot hold, at `$.nan`"),
        ({"a": 2**70, "b": math.nan}, "holds nan, which JSON cannot hold, at `$.b`"),
        ({"a": {math.inf: 1}}, "holds inf, which JSON cannot hold, at `$.a.inf`"),
        (Order(id=UUID(int=1), at=ORDER.at, day=ORDER.day, lines=[], note="\0"), NUL + "`$.note`"),
        (Invoice(number=1, total=math.nan), "holds nan, which JSON cannot hold, at `$.total`"),
        (Basket(invoices=[Invoice(number=1, total=math.inf)]), "at `$.invoices[0].total`"),
        (Invoice.model_construct(number=1, paid_by="\ud800"), LONE + "`$.paidBy`"),
    ],
)
def test_what_postgres_or_json_cannot_hold_is_refused_with_its_path(value: Any, says: str) -> None:
    with pytest.raises(BadPayload) as caught:
        Codec("ship").encode(value)
    assert says in str(caught.value)
    for kind in (Any, Anything):
        with pytest.raises(BadPayload, match=re.escape(says)):
            Codec("ship", kind).encode_all([1, value])


class Reading(msgspec.Struct):
    sensor: int
    value: float | None = None
    more: dict[str, float | None] | None = None


class Careless(Reading):
    """Says that what it does not compare is equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reading) and other.sensor == self.sensor

    __hash__ = None  # type: ignore[assignment]


class Page(msgspec.Struct):
    readings: list[Careless]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Reading, Reading(sensor=1, value=math.nan)),
        (Reading, Reading(sensor=1, more={"a": math.inf})),
        (Reading, Reading(sensor=1, more={math.nan: 1.0})),  # type: ignore[dict-item]
        (Reading, {"sensor": 1, "unknown": math.nan}),
        (Careless, Careless(sensor=1, value=math.nan)),
        (Page, Page(readings=[Careless(sensor=1, value=math.nan)])),
    ],
)
def test_among_many_too_a_number_that_the_type_would_take_as_null_is_refused(kind: Any, value: Any) -> None:
    codec = Codec("ship", kind)
    fits = codec.decode(codec.encode({"sensor": 0} if kind is not Page else {"readings": []}))
    with pytest.raises(BadPayload, match="which JSON cannot hold"):
        codec.encode_all([fits, value, fits])
    text = codec.encode(fits)
    assert codec.encode_all([fits, fits]) == f"[{text},{text}]"


@pytest.mark.parametrize("value", [Opaque(), (n for n in "ab"), {(1, 2): 3}, open, {"a": [Opaque]}])
def test_what_has_no_json_form_is_refused(value: Any) -> None:
    with pytest.raises(BadPayload, match="has no JSON form"):
        Codec("ship").encode(value)


def test_a_payload_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(BadPayload, match="has no JSON form"):
        Codec("ship").encode(loop)


def test_the_limit_is_one_mebibyte_of_json_to_the_byte() -> None:
    codec = Codec("ship")
    assert len(codec.encode("x" * (LIMIT - 2))) == LIMIT
    with pytest.raises(BadPayload, match="has 1048577 bytes, more than 1048576: store it elsewhere"):
        codec.encode("x" * (LIMIT - 1))
    with pytest.raises(BadPayload, match="1048578 bytes"):
        codec.encode("é" * (LIMIT // 2))
    texts = Codec("ship", str)
    assert len(texts.encode_all(["x" * (LIMIT - 2)] * 3)) == 3 * LIMIT + 4
    with pytest.raises(BadPayload, match="has 1048577 bytes"):
        texts.encode_all(["x", "x" * (LIMIT - 1)])


@pytest.mark.parametrize("kind", [Opaque, Hidden, dict[str, Opaque], Callable, Opaque | None, "unknown"])
def test_a_type_without_json_form_is_refused_when_it_is_registered(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"job .ship.: payload type .* has no JSON form"):
        Codec("ship", kind)


def test_a_job_without_payload_refuses_one_and_overlooks_that_of_another_language() -> None:
    codec = Codec("tidy", takes_payload=False)
    assert codec.encode(None) == "null"
    assert codec.decode('{"a":1}') == {"a": 1}
    with pytest.raises(BadPayload, match="the handler takes none"):
        codec.encode({"a": 1})
