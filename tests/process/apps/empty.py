"""An app without jobs."""

from __future__ import annotations

from pgqueue import App

app = App()
