"""Outbox events inside the business transaction, published in order per aggregate, at least once."""

from __future__ import annotations

from relay.event import NewEvent
from relay.inbox import Inbox
from relay.outbox import Outbox

__all__ = ["Inbox", "NewEvent", "Outbox"]
