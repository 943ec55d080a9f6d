"""Run the revisions of schema pgqueue: online on the connection it is given, offline as a script.

`pgqueue migrate` starts it; config.attributes carries the connection and the lock timeout. Nothing here
imports pgqueue, so old revisions keep running whatever becomes of the code.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

# Not CREATE SCHEMA IF NOT EXISTS: that asks for CREATE on the database even when the schema is there, which a
# role that was given its schema ready-made does not have.
CREATE_SCHEMA = """\
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'pgqueue') THEN
    CREATE SCHEMA pgqueue;
    COMMENT ON SCHEMA pgqueue IS 'made by the pgqueue migrations';
  END IF;
END $$"""

# After the last downgrade: the version table goes, and the schema if the migrations made it and it is empty.
DROP_SCHEMA = """\
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pgqueue.alembic_version) THEN
    DROP TABLE pgqueue.alembic_version;
    IF pg_catalog.obj_description(pg_catalog.to_regnamespace('pgqueue'), 'pg_namespace')
         = 'made by the pgqueue migrations' THEN
      BEGIN
        DROP SCHEMA pgqueue;
      EXCEPTION WHEN dependent_objects_still_exist THEN
        RAISE NOTICE 'schema pgqueue holds objects of somebody else and stays';
      END;
    END IF;
  END IF;
END $$"""


def online(connection: Connection) -> None:
    with connection.begin():
        connection.exec_driver_sql(CREATE_SCHEMA, execution_options={"no_parameters": True})
    context.configure(connection=connection, version_table_schema="pgqueue", transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()
    if context.config.attributes.get("down"):
        connection.commit()
        with connection.begin():
            connection.exec_driver_sql(DROP_SCHEMA, execution_options={"no_parameters": True})


def offline() -> None:
    context.configure(
        dialect_name="postgresql",
        version_table_schema="pgqueue",
        transaction_per_migration=True,
        literal_binds=True,
    )
    write = context.get_context().impl.static_output
    write(f"SET lock_timeout = '{context.config.attributes['lock_timeout_ms']}ms';\n")
    if not context.config.attributes.get("down"):
        write(CREATE_SCHEMA + ";\n")
    with context.begin_transaction():
        context.run_migrations()
    if context.config.attributes.get("down"):
        write(DROP_SCHEMA + ";\n")


if context.is_offline_mode():
    offline()
else:
    online(context.config.attributes["connection"])
