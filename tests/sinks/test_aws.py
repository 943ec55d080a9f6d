"""SQS, SNS and Kinesis: what can go wrong with them, on an emulator, and answers that it never gives."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("boto3", reason="broker: no boto3; install the Python package boto3")

from botocore.stub import Stubber

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, Confirmed, Event, Rejected, Unavailable
from relay.send import send
from relay.sinks import Sink, SinkContext, SinkUnavailable, open_sink
from relay.sinks.aws import Entry, Limits, pack
from relay.sinks.aws_messages import deduplication, group, text
from relay.sinks.kinesis import partition_key
from tests.sinks.aws_rigs import ENVIRONMENT, AwsRig, SqsRig
from tests.sinks.events import SOURCE, Made
from tests.sinks.ordeal import endure, network_faults

LATER = float("inf")
ALLOWED = set(string.ascii_letters + string.digits + string.punctuation)

URLS = {
    "sqs": "sqs://q.fifo?region=eu-central-1",
    "sns": "sns://t.fifo?region=eu-central-1&account=123456789012",
    "kinesis": "kinesis://s?region=eu-central-1",
}


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def stubbed(kind: str) -> tuple[Sink, Stubber]:
    """Return a sink whose service answers what a test says."""
    sink: Any = open_sink(URLS[kind], SinkContext(source=SOURCE, parallel=1))
    stub = Stubber(sink.client)
    if kind == "sqs":
        stub.add_response("get_queue_url", {"QueueUrl": "https://sqs/q.fifo"})
        stub.add_response("get_queue_attributes", {"Attributes": {"MaximumMessageSize": "2048"}})
    stub.activate()
    return sink, stub


OPERATION = {"sqs": "send_message_batch", "sns": "publish_batch", "kinesis": "put_records"}


def answer(kind: str, failed: Mapping[int, tuple[str, bool]], count: int) -> dict[str, Any]:
    """Return an answer in which some entries failed: (code, whether the sender is to blame)."""
    if kind == "kinesis":
        records = [
            {"ErrorCode": failed[n][0], "ErrorMessage": "later"}
            if n in failed
            else {"SequenceNumber": str(n), "ShardId": "shardId-0"}
            for n in range(count)
        ]
        return {"Records": records} | ({"FailedRecordCount": len(failed)} if failed else {})
    good = [{"Id": str(n), "MessageId": str(n)} for n in range(count) if n not in failed]
    if kind == "sqs":
        good = [entry | {"MD5OfMessageBody": "0" * 32} for entry in good]
    bad = [{"Id": str(n), "Code": code, "SenderFault": fault} for n, (code, fault) in failed.items()]
    return {"Successful": good, "Failed": bad}


@pytest.mark.parametrize(
    "key", ["order-1", "a b", "é😀", "100%", "a%20b", "x" * 128, "x" * 129, "ü" * 40, "", "\n"]
)
def test_a_group_id_has_allowed_characters_and_length(key: str) -> None:
    made = group(key)
    assert set(made) <= ALLOWED
    assert 1 <= len(made) <= 128
    assert made == key or not set(key) <= ALLOWED or "%" in key or not 0 < len(key) <= 128


def test_different_keys_have_different_groups() -> None:
    keys = ["a b", "a%20b", "a%2520b", "x" * 200, "x" * 201, "", "é", "é".encode().decode("latin-1")]
    assert len({group(key) for key in keys}) == len(keys)


def test_a_repetition_is_dropped_by_source_and_key() -> None:
    event, other = Made().event(), Made().event()
    assert event.id == other.id
    assert deduplication(event, "/outbox/shop") == deduplication(other, "/outbox/shop")
    assert deduplication(event, "/outbox/shop") != deduplication(event, "/outbox/shop/2")


def test_a_partition_key_fits_kinesis() -> None:
    assert partition_key("é" * 256) == "é" * 256
    assert partition_key("x" * 257) != partition_key("x" * 258)
    assert all(1 <= len(partition_key(key)) <= 256 for key in ("", "x" * 500))


def test_characters_that_a_message_may_not_hold_are_escaped_in_the_json() -> None:
    payload = {"a": "\ufffe\uffff \U0001f600"}
    made = text(Made().event(payload=json.dumps(payload, ensure_ascii=False)), SOURCE)
    assert not {"\ufffe", "\uffff"} & set(made)
    assert json.loads(made)["data"] == payload


def test_calls_hold_no_more_entries_and_bytes_than_allowed() -> None:
    made = Made()
    sizes = [400, 400, 400, 1000, 1, 1, 1, 1, 1]
    entries = [Entry(event=made.event(), size=size, fields={}) for size in sizes]
    batches = pack(entries, Limits(entries=3, bytes=1000, entry_bytes=1000))
    assert [[e.size for e in b] for b in batches] == [[400, 400], [400], [1000], [1, 1, 1], [1, 1]]


@pytest.mark.parametrize("kind", URLS)
def test_an_entry_that_fails_stops_its_aggregate_and_no_other(kind: str) -> None:
    sink, stub = stubbed(kind)
    made = Made()
    events = [made.event(key) for key in ("a", "b", "c", "b", "b", "c")]
    stub.add_response(OPERATION[kind], answer(kind, {1: ("InternalFailure", False)}, 3))
    stub.add_response(OPERATION[kind], answer(kind, {}, 1))
    sent = send(sink, events, deadline=LATER)
    assert sorted(sent.confirmed) == [1, 3, 6]
    assert list(sent.unanswered) == [2]
    assert sorted(e.id for e in sent.unconfirmed) == [2, 4, 5]
    stub.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("code", "fault", "kind"),
    [
        ("InvalidMessageContents", True, Rejected),
        ("AWS.SimpleQueueService.InvalidMessageContents", True, Rejected),
        ("InvalidParameterValue", True, Rejected),
        ("RequestThrottled", True, Unavailable),
        ("KmsThrottled", True, Unavailable),
        ("AccessDenied", True, Unavailable),
        ("InternalError", False, Unavailable),
    ],
)
def test_only_what_is_about_the_entry_itself_is_a_rejection(code: str, fault: bool, kind: type) -> None:
    sink, stub = stubbed("sqs")
    stub.add_response("send_message_batch", answer("sqs", {0: (code, fault)}, 1))
    (receipt,) = sink.publish([Made().event()])
    assert isinstance(receipt, kind)


@pytest.mark.parametrize(
    "code",
    [
        "AccessDenied",
        "ThrottlingException",
        "KMSInvalidStateException",
        "ResourceNotFoundException",
        "InvalidClientTokenId",
    ],
)
@pytest.mark.parametrize("kind", URLS)
def test_an_error_of_the_whole_call_is_no_rejection(kind: str, code: str) -> None:
    sink, stub = stubbed(kind)
    stub.add_client_error(OPERATION[kind], code)
    made = Made()
    receipts = sink.publish([made.event("a"), made.event("b")])
    assert [type(r) for r in receipts] == [Unavailable] * 2
    assert all(code in r.reason for r in receipts if isinstance(r, Unavailable))


def test_one_entry_that_spoils_a_call_is_found() -> None:
    sink, stub = stubbed("sqs")
    stub.add_client_error("send_message_batch", "InvalidMessageContents", "bad character")
    stub.add_response("send_message_batch", answer("sqs", {}, 1))
    stub.add_client_error("send_message_batch", "InvalidMessageContents", "bad character")
    made = Made()
    first, second = sink.publish([made.event("a"), made.event("b")])
    assert first == CONFIRMED
    assert isinstance(second, Rejected)
    assert "bad character" in second.reason


def test_an_entry_that_an_answer_does_not_mention_is_not_confirmed() -> None:
    sink, stub = stubbed("sqs")
    stub.add_response("send_message_batch", answer("sqs", {}, 1))
    made = Made()
    first, second = sink.publish([made.event("a"), made.event("b")])
    assert first == CONFIRMED
    assert isinstance(second, Unavailable)


def test_the_limit_of_the_queue_is_known_before_anything_is_sent() -> None:
    sink, stub = stubbed("sqs")
    made = Made()
    (receipt,) = sink.publish([made.event(payload=json.dumps("x" * 2000))])
    assert isinstance(receipt, Rejected)
    assert "2048" in receipt.reason
    stub.assert_no_pending_responses()


def test_a_queue_that_is_not_there_is_unavailable(sqs_rig: SqsRig) -> None:
    sink = open_sink(sqs_rig.url(sqs_rig.broker.port).replace("//t", "//other"), SinkContext(source=SOURCE))
    with pytest.raises(SinkUnavailable, match=r"NonExistentQueue|QueueDoesNotExist"):
        sink.publish([sqs_rig.event()])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqs:q", "no host"),
        ("sqs://a/b?region=x", "NAME"),
        ("sqs://q?region=x&color=red", "color"),
        ("sqs://q", "region"),
        ("sns://t?region=eu-central-1", "account"),
        ("kinesis://s?region=eu-central-1&max_bytes=many", "max_bytes"),
    ],
)
def test_a_url_that_says_too_little_is_refused_at_start(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_sink(url, SinkContext(source=SOURCE))


def test_a_message_carries_group_and_attributes(sqs_rig: SqsRig) -> None:
    sqs_rig.sink.publish([sqs_rig.event("order 7")])
    (message,) = sqs_rig.received(sqs_rig.own)
    assert message["Attributes"]["MessageGroupId"] == "order%207"
    assert {name: a["StringValue"] for name, a in message["MessageAttributes"].items()} == {
        "id": "outbox:1",
        "type": "order.placed",
        "source": SOURCE,
        "partitionkey": "order 7",
        "content-type": "application/cloudevents+json",
    }


def test_two_outboxes_in_one_queue_drop_nothing_of_each_other(sqs_rig: SqsRig) -> None:
    event = sqs_rig.event("order-1")
    other = sqs_rig.open(source="/outbox/other")
    assert list(sqs_rig.sink.publish([event])) == list(other.publish([event])) == [Confirmed()]
    assert len(sqs_rig.arrived()) == 2


def test_a_standard_queue_takes_everything_once_a_call(sqs_rig: SqsRig) -> None:
    queue = sqs_rig.queue(sqs_rig.name)
    sink = open_sink(sqs_rig.url(sqs_rig.broker.port).replace(".fifo", ""), SinkContext(source=SOURCE))
    events: list[Event] = [sqs_rig.event(f"order-{n}") for n in range(25)]
    assert set(sink.publish(events)) == {CONFIRMED}
    assert len(sqs_rig.received(queue)) == 25


@pytest.fixture(params=["sqs_rig", "sns_rig", "kinesis_rig"])
def any_rig(request: pytest.FixtureRequest) -> AwsRig:
    """Give each sink in turn."""
    made: AwsRig = request.getfixturevalue(request.param)
    return made


@pytest.mark.slow
def test_under_faults_of_the_network_nothing_is_lost_or_inverted(any_rig: AwsRig, dsn: str) -> None:
    endure(any_rig, dsn, network_faults(any_rig))
