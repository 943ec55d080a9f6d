from __future__ import annotations

import pytest
from psycopg.conninfo import conninfo_to_dict

from pgqueue.dsn import connect, has_password, mask, resolve
from pgqueue.errors import BadOption, DatabaseUnreachable


def test_an_option_wins_over_pgqueue_dsn_over_database_url_over_libpq() -> None:
    environ = {
        "PGQUEUE_DSN": "postgresql:///queue",
        "DATABASE_URL": "postgresql:///url",
        "PGDATABASE": "libpq",
    }
    assert resolve("postgresql:///option", environ) == "postgresql:///option"
    assert resolve(None, environ) == "postgresql:///queue"
    del environ["PGQUEUE_DSN"]
    assert resolve(None, environ) == "postgresql:///url"
    del environ["DATABASE_URL"]
    assert resolve(None, environ) == ""


def test_an_empty_variable_counts_as_unset() -> None:
    assert resolve("", {"PGQUEUE_DSN": " ", "DATABASE_URL": "host=db"}) == "host=db"


def test_without_any_name_of_a_database_the_error_lists_the_ways_to_give_one() -> None:
    with pytest.raises(BadOption, match=r"--dsn.*PGQUEUE_DSN.*DATABASE_URL.*PGHOST"):
        resolve(None, {"PGPASSWORD": "secret"})


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("postgresql://u:p@h:5/d", {"user": "u", "password": "p", "host": "h", "port": "5", "dbname": "d"}),
        ("postgres://u@h/d?sslmode=require", {"user": "u", "host": "h", "dbname": "d", "sslmode": "require"}),
        ("postgresql+psycopg://u:p%40x@h/d", {"user": "u", "password": "p@x", "host": "h", "dbname": "d"}),
        ("postgresql+psycopg2://u@h/d", {"user": "u", "host": "h", "dbname": "d"}),
        ("postgresql+asyncpg://h/d?ssl=require", {"host": "h", "dbname": "d", "sslmode": "require"}),
        ("postgresql+psycopg:///d?host=/run/pg&port=1", {"host": "/run/pg", "dbname": "d", "port": "1"}),
        (
            "postgresql+psycopg://u@/d?host=a:1&host=b:2",
            {"user": "u", "host": "a,b", "port": "1,2", "dbname": "d"},
        ),
        ("postgresql+psycopg:///d?options=-c+role%3Dx", {"dbname": "d", "options": "-c role=x"}),
        ("postgresql+psycopg://u@[::1]:5/d", {"user": "u", "host": "::1", "port": "5", "dbname": "d"}),
        ("host=h dbname=d password='a b'", {"host": "h", "dbname": "d", "password": "a b"}),
    ],
)
def test_urls_of_sqlalchemy_and_of_libpq_name_the_same_database(given: str, plain: dict[str, str]) -> None:
    assert conninfo_to_dict(resolve(given, {})) == plain


@pytest.mark.parametrize("given", ["embedded:", "embedded:/var/lib/x"])
def test_an_embedded_dsn_is_left_to_the_edge(given: str) -> None:
    assert resolve(None, {"DATABASE_URL": given}) == given


@pytest.mark.parametrize(
    "given",
    [
        "mysql://u:hunter2@h/d",
        "sqlite:///x?password=hunter2",
        "postgresql://u:hunter2@h:port/d?nosuch=1",
        "postgresql+psycopg://u:hunter2@h/d?nosuch=1",
        "host=h password='hunter2",
        "host=h password=hunter2 nosuch",
        "just some words",
    ],
)
def test_a_dsn_that_cannot_be_read_is_refused_and_its_password_not_shown(given: str) -> None:
    with pytest.raises(BadOption) as caught:
        resolve(given, {})
    assert "hunter2" not in str(caught.value)
    assert "postgresql://" in str(caught.value) or "option" in str(caught.value)


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://u:hunter2@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:hun@ter2@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:hun/ter2@h/d", "postgresql://u:***@h/d"),
        ("postgresql://h/d?user=u&password=hunter2&x=1", "postgresql://h/d?user=u&password=***&x=1"),
        ("host=h password=hunter2 dbname=d", "host=h password=*** dbname=d"),
        (r"host=h password = 'hun\'ter 2' dbname=d", "host=h password = *** dbname=d"),
        ("sslpassword=hunter2 host=h", "sslpassword=*** host=h"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("postgresql://h/d?passfile=/x", "postgresql://h/d?passfile=/x"),
        ("host=h dbname=d", "host=h dbname=d"),
    ],
)
def test_a_mask_hides_every_password_and_nothing_else(dsn: str, shown: str) -> None:
    assert mask(dsn) == shown
    assert has_password(dsn) is (dsn != shown)


def test_an_unreachable_server_is_an_error_of_ours_with_the_password_masked() -> None:
    with pytest.raises(DatabaseUnreachable) as caught:
        connect("postgresql://u:hunter2@127.0.0.1:1/d")
    assert "hunter2" not in str(caught.value)
    assert "postgresql://u:***@127.0.0.1:1/d" in str(caught.value)
    assert "check the DSN" in str(caught.value)
    assert "\n" not in str(caught.value)
