-- What a migration asks of the server around the frozen text of its revisions.

-- name: server
SELECT pg_catalog.current_setting('server_version_num')::int,
       pg_catalog.current_setting('server_version'),
       pg_catalog.pg_is_in_recovery()

-- name: try_lock
-- One migration of a database at a time; the lock ends with its transaction.
SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('pgqueue.migrate', 0))

-- name: guard
-- The transaction that holds the lock idles while the revisions run elsewhere: no timeout may end it.
SELECT pg_catalog.count(pg_catalog.set_config(s.name, '0', true))
FROM pg_catalog.pg_settings s
WHERE s.name IN ('idle_in_transaction_session_timeout', 'transaction_timeout', 'statement_timeout')

-- name: settings
-- For each transaction of a revision: wait for locks this long, for work as long as it takes; names are qualified.
SELECT pg_catalog.set_config('lock_timeout', %(lock_timeout)s, true),
       pg_catalog.set_config('statement_timeout', '0', true),
       pg_catalog.set_config('search_path', '', true)

-- name: grant_role
SELECT pgqueue.grant_role(%(kind)s, %(role)s)
