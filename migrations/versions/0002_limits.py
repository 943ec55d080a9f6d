"""Limits per key and per queue, and what the first revision left to be desired.

Revision ID: pgqueue_0002
Revises: pgqueue_0001
"""

from __future__ import annotations

from pathlib import Path

from alembic.util import load_python_file

revision = "pgqueue_0002"
down_revision = "pgqueue_0001"
branch_labels = None
depends_on = None

_step = load_python_file(str(Path(__file__).parents[1]), "step.py")


def upgrade() -> None:
    _step.up(__file__, revision)


def downgrade() -> None:
    _step.down(__file__, revision, down_revision)
