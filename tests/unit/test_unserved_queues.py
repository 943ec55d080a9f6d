"""A worker mentions jobs of its app that would wait for ever."""

from __future__ import annotations

import pytest

from pgqueue import App
from pgqueue.cli._worker import _mention_unserved

app = App()


@app.job("send-receipt", queue="mail")
def send_receipt() -> None: ...


@app.job("count")
def count() -> None: ...


def test_a_worker_told_no_queue_mentions_those_it_does_not_serve(caplog: pytest.LogCaptureFixture) -> None:
    _mention_unserved(app, ("default",))
    assert "does not serve: mail; see --queues" in caplog.text


def test_a_misspelt_queue_is_mentioned_with_those_of_the_app(caplog: pytest.LogCaptureFixture) -> None:
    _mention_unserved(app, ("mial",))
    assert "does not serve: default,mail; see --queues" in caplog.text


def test_a_choice_among_the_queues_of_the_app_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    _mention_unserved(app, ("mail",))
    _mention_unserved(app, ("default", "mail"))
    assert not caplog.text
