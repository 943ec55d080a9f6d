"""${message}.

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from __future__ import annotations

from pathlib import Path

from alembic.util import load_python_file

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}

_step = load_python_file(str(Path(__file__).parents[1]), "step.py")


def upgrade() -> None:
    _step.up(__file__, revision)


def downgrade() -> None:
    _step.down(__file__, revision, down_revision)
