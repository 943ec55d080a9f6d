from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import pytest

from pgqueue import App, Backoff, BadOption, ConfigError, Job
from pgqueue.declare import Policy, declare


@dataclass
class Receipt:
    order_id: int


def plain(receipt: Receipt) -> None: ...
def with_job(receipt: Receipt, job: Job) -> None: ...
def with_keyword_job(receipt: Receipt, *, context: Job) -> None: ...
def with_optional_job(receipt: Receipt, context: Job | None = None) -> None: ...
def with_untyped_job(receipt, job): ...  # type: ignore[no-untyped-def]  # handlers need no annotations
def job_alone(job: Job) -> None: ...
def nothing() -> None: ...
def with_default(receipt: Receipt, mailer: str = "smtp") -> None: ...
def default_alone(mailer: str = "smtp") -> None: ...
def with_rest(receipt: Receipt, **rest: object) -> None: ...
def untyped(receipt): ...  # type: ignore[no-untyped-def]  # handlers need no annotations
def constrained(n: Annotated[int, msgspec.Meta(ge=0)]) -> None: ...
async def asynchronous(receipt: Receipt, job: Job) -> None: ...


class Shop:
    def method(self, receipt: Receipt) -> None: ...


@functools.wraps(with_job)
def wrapped(*args: Any, **kwargs: Any) -> None:
    with_job(*args, **kwargs)


@pytest.mark.parametrize(
    ("handler", "payload", "job", "kind"),
    [
        (plain, True, None, Receipt),
        (with_job, True, "job", Receipt),
        (with_keyword_job, True, "context", Receipt),
        (with_optional_job, True, "context", Receipt),
        (with_untyped_job, True, "job", Any),
        (job_alone, False, "job", Any),
        (nothing, False, None, Any),
        (with_default, True, None, Receipt),
        (default_alone, False, None, Any),
        (with_rest, True, None, Receipt),
        (untyped, True, None, Any),
        (constrained, True, None, Annotated[int, msgspec.Meta(ge=0)]),
        (asynchronous, True, "job", Receipt),
        (Shop().method, True, None, Receipt),
        (wrapped, True, "job", Receipt),
    ],
)
def test_the_signature_says_payload_context_and_type(
    handler: Callable[..., Any], payload: bool, job: str | None, kind: Any
) -> None:
    found = App().job("ship")(handler)
    assert (found.payload_parameter, found.job_parameter, found.codec.kind) == (payload, job, kind)
    assert found.is_async is (handler is asynchronous)


def two(a: int, b: int) -> None: ...
def job_first(job: Job, receipt: Receipt) -> None: ...
def keyword_payload(*, receipt: Receipt) -> None: ...
def two_jobs(receipt: Receipt, job: Job, again: Job) -> None: ...
def positional_job(receipt: Receipt, job: Job, /) -> None: ...
def unwrapped(*args: Any, **kwargs: Any) -> None: ...
def unresolvable(receipt: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821  # the point of the test
def unreadable(receipt: functools) -> None: ...  # type: ignore[valid-type]  # the point of the test
def generator(receipt: Receipt) -> Iterator[int]:
    yield 1


async def async_generator(receipt: Receipt) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (two, "takes a, b; a handler takes one payload"),
        (job_first, "takes receipt, its payload, not as the first parameter"),
        (keyword_payload, "takes receipt, its payload, not as the first parameter and by position"),
        (two_jobs, "takes two contexts, job and again"),
        (positional_job, "takes job by position only"),
        (unwrapped, r"takes \*args; .*functools.wraps"),
        (unresolvable, "cannot be resolved .*'Nowhere' is not defined.*at the top of the module"),
        (unreadable, "payload type .* has no JSON form|cannot be resolved"),
        (generator, "is a generator"),
        (async_generator, "is a generator"),
        (functools.partial(plain), "not a function"),
        (Shop, "not a function"),
        (None, "not a function"),
    ],
)
def test_a_handler_that_could_not_run_is_refused_when_it_is_registered(handler: Any, says: str) -> None:
    app = App()
    with pytest.raises(ConfigError, match=f"job 'ship': .*{says}"):
        app.job("ship")(handler)
    assert not app.types


def test_a_process_handler_is_a_plain_function_of_a_module() -> None:
    app = App()
    assert app.job("ship", process=True)(plain).is_process
    with pytest.raises(ConfigError, match="not `async def`"):
        app.job("a", process=True)(asynchronous)
    with pytest.raises(ConfigError, match="at the top of a module"):
        app.job("b", process=True)(lambda: None)


def test_a_decorator_without_a_name_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r'write @app\.job\("plain"\)'):
        App().job(plain)  # type: ignore[arg-type]


def test_a_name_is_registered_once() -> None:
    app = App()
    app.job("ship")(plain)
    with pytest.raises(ConfigError, match=r"job .ship. is registered twice: .*plain.*nothing"):
        app.job("ship")(nothing)


def test_registering_a_job_instead_of_its_function_is_refused() -> None:
    app = App()
    job = app.job("ship")(plain)
    with pytest.raises(ConfigError, match="not a function"):
        app.job("again")(job)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"name": ""}, "name"),
        ({"name": " "}, "name"),
        ({"name": "n" * 10_240}, "name"),
        ({"name": "a\0"}, "name"),
        ({"queue": ""}, "queue"),
        ({"priority": 10}, "priority"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
        ({"backoff": 3}, "backoff"),
    ],
)
def test_a_bad_policy_is_refused_by_name(options: dict[str, Any], option: str) -> None:
    with pytest.raises(BadOption) as caught:
        App().job(**{"name": "ship"} | options)
    assert caught.value.option == option


def test_policy_left_out_means_the_built_in_default() -> None:
    job = App().job("ship")(plain)
    assert job.policy == Policy(name="ship")
    assert (job.queue, job.max_attempts, job.timeout, job.backoff) == ("default", 5, 600.0, Backoff())


def test_policy_that_is_given_is_the_type_s() -> None:
    job = App().job(
        "ship", queue="mail", priority=0, max_attempts=2, timeout=timedelta(seconds=3), backoff=Backoff(cap=9)
    )(plain)
    assert job.policy == Policy(
        name="ship", queue="mail", priority=0, max_attempts=2, timeout=3.0, backoff=Backoff(cap=9)
    )
    assert (job.queue, job.max_attempts, job.timeout, job.backoff) == ("mail", 2, 3.0, Backoff(cap=9))


def test_no_timeout_is_written_as_infinity() -> None:
    job = App().job("ship", timeout=math.inf)(plain)
    assert job.timeout == math.inf
    assert '"timeout_s": "Infinity"' in str(declare([job.policy]).params["types"])


def test_calling_a_job_type_calls_the_handler_itself() -> None:
    @App().job("double")
    def double(n: int) -> int:
        return 2 * n

    assert double(4) == 8


def test_an_event_has_its_subscribers_in_the_order_of_registration() -> None:
    app = App()
    app.on_event("order.placed", queue="mail")(plain)
    app.on_event("order.placed", name="ledger")(nothing)
    app.on_event("order.sent")(nothing)
    assert app.subscribers("order.placed") == ("order.placed/plain", "ledger")
    assert app.subscribers("order.lost") == ()
    assert app.types["order.placed/plain"].queue == "mail"


def test_one_subscription_decorates_several_functions() -> None:
    app = App()
    placed = app.on_event("order.placed")
    placed(plain)
    placed(nothing)
    assert app.subscribers("order.placed") == ("order.placed/plain", "order.placed/nothing")


def test_a_refused_subscriber_is_not_subscribed() -> None:
    app = App()
    with pytest.raises(ConfigError):
        app.on_event("order.placed")(two)
    assert app.subscribers("order.placed") == ()


@pytest.mark.parametrize(
    ("decorator", "advice"),
    [("job", r'write @app\.job\("resize"\)'), ("on_event", r'write @app\.on_event\("order\.placed"\)')],
)
def test_a_decorator_without_its_argument_says_what_to_write(decorator: str, advice: str) -> None:
    def resize() -> None: ...

    with pytest.raises(ConfigError, match=advice):
        getattr(App(), decorator)(resize)
