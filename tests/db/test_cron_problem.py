"""SQL refuses the expressions that a worker could not read or that never come true, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgqueue.cron import Cron
from pgqueue.errors import BadOption
from tests.server import Connection, Server

FIELDS = (
    (0, 59, ()),
    (0, 59, ()),
    (0, 23, ()),
    (1, 31, ()),
    (1, 12, ("JAN", "feb", "Jul")),
    (0, 7, ("SUN", "mon", "Sat")),
)


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Connection]:
    """Give a connection to one database for the whole module: nothing here writes."""
    name = server.migrated()
    with psycopg.connect(server.dsn(name), autocommit=True) as conn:
        yield conn
    server.drop(name)


def sql(conn: Connection, expr: str) -> str | None:
    found = conn.execute("SELECT pgqueue.cron_problem(%s)", [expr]).fetchone()
    assert found
    return None if found[0] is None else str(found[0])


def python(expr: str) -> str | None:
    try:
        Cron(expr)
    except BadOption as error:
        return error.problem
    return None


def whole(low: int, high: int, names: tuple[str, ...]) -> st.SearchStrategy[str]:
    near = st.sampled_from([low, high, max(low - 1, 0), high + 1])
    numbers = st.integers(low, high).map(str) | near.map(str) | st.integers(low, high).map("{:03}".format)
    return numbers | st.sampled_from(names) if names else numbers


@st.composite
def field(draw: st.DrawFn, place: int) -> str:
    """Draw one field, mostly a good one."""
    low, high, names = FIELDS[place]
    one = whole(low, high, names)
    step = st.sampled_from([*map(str, range(1, 9)), "15", "20", "27", "28", "30", "31", "99", "0"])
    special = {
        3: ["L", "LW", "lw", "L/2", "LW/0", "L-1"],
        5: ["5L", "0l", "L", "MON#1", "1#5", "7#4", "1#6", "SUNL", "7L/2"],
    }
    term = st.one_of(
        st.just("*"),
        one,
        st.tuples(one, one).map("-".join),
        st.tuples(st.just("*") | one | st.tuples(one, one).map("-".join), step).map("/".join),
        st.sampled_from(special.get(place, ["*"])),
    )
    odd = st.text(alphabet="0123456789*/,#-LWMONJA", max_size=5)
    terms = draw(st.lists(term, min_size=1, max_size=2))
    return ",".join(terms) if draw(st.integers(0, 20)) else draw(odd)


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Draw whole expressions; many name days that few months have."""
    seconds = [draw(field(0))] if draw(st.booleans()) else []
    day = draw(field(3) | st.sampled_from(["31", "30,31", "*/30", "*/29", "*/31,LW", "LW", "29-31", "L"]))
    month = draw(field(4) | st.sampled_from(["2", "FEB", "2,4", "4-6/2", "*/3"]))
    weekday = draw(field(5) | st.sampled_from(["*", "*/7", "*/6", "*/5,1#1", "MON#5", "1#1", "*/7,5L"]))
    rest = ["0", "*"] if draw(st.booleans()) else [draw(field(1)), draw(field(2))]
    return draw(st.sampled_from([" ", "  ", "\t"])).join([*seconds, *rest, day, month, weekday])


@settings(max_examples=600)
@given(expr=expressions())
def test_sql_and_a_worker_refuse_the_same_expressions(expr: str, shared: Connection) -> None:
    assert (sql(shared, expr) is None) == (python(expr) is None), (sql(shared, expr), python(expr))


@settings(max_examples=200)
@given(
    expr=st.text(alphabet="0159*/,#- \t\nLlWMOND;\u017f\x1f\x0b\u00a0", max_size=20)
    | st.just("* " * 101 + "*")
)
def test_sql_and_a_worker_refuse_the_same_nonsense(expr: str, shared: Connection) -> None:
    assert (sql(shared, expr) is None) == (python(expr) is None), (sql(shared, expr), python(expr))


@pytest.mark.parametrize(
    ("expr", "says"),
    [
        ("0 0 31 2 *", "bad day-of-month (out of range, or in none of its months)"),
        ("0 0 30,31 2 *", "bad day-of-month (out of range, or in none of its months)"),
        ("0 0 31 4,6 *", "bad day-of-month (out of range, or in none of its months)"),
        ("0 0 LW * */7", "never comes true"),  # the last weekday is no Sunday
        ("0 0 */31 * MON#5", "never comes true"),  # the first is no fifth Monday
        ("60 * * * *", "bad minute"),
        ("0 0 32 * *", "bad day-of-month"),
        ("*/0 * * * *", "bad minute"),
        ("5-1 * * * *", "bad minute"),
        ("* * * JUN-MAI *", "bad month"),
        ("* * * * FRI-MON", "bad day-of-week"),
        ("* * * * MON#6", "bad day-of-week"),
        ("60 * * * * *", "bad second"),
        ("* * * * * * *", None),
        ("", None),
        ("@daily", None),
        ("0 2 \u017f * *", None),
    ],
)
def test_what_never_comes_or_makes_no_sense_is_refused_with_the_words_of_python(
    expr: str, says: str | None, shared: Connection
) -> None:
    assert (says or "is not minute hour day month weekday") in str(sql(shared, expr))
    assert (says or "; write minute hour day month weekday") in str(python(expr))


@pytest.mark.parametrize(
    "expr",
    [
        "0 0 29 2 *",
        "0 0 */28 FEB mon#5",  # once in 28 years
        "0 0 31 2 MON",
        "0 0 LW * */5",
        "\t0 0\n1 JAN-DEC/3 sun-Sat ",
        "0 0 0 1-1/30 12 5L",
        "59 59 23 31 12 7",
        f"*/{'9' * 150} * * * *",
    ],
)
def test_what_comes_seldom_is_accepted(expr: str, shared: Connection) -> None:
    assert (sql(shared, expr), python(expr)) == (None, None)
