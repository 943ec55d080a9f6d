-- name: level
-- Whether the server writes what logical decoding needs, and what the slot of this database is called.
SELECT current_setting('wal_level'), 'pgqueue_outbox_' || d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()

-- name: has_publication
-- Whether the publication of new ids is there.
SELECT EXISTS (SELECT FROM pg_catalog.pg_publication p WHERE p.pubname = 'pgqueue_outbox')

-- name: publication
-- Publishes the ids of new events and nothing else: the rows are read from the table.
CREATE PUBLICATION pgqueue_outbox FOR TABLE pgqueue.outbox (id) WITH (publish = 'insert')

-- name: slot_state
-- Whether the slot is there, and whether it is of use: the server gives up one that asks for more log than it may keep.
SELECT s.wal_status IS DISTINCT FROM 'lost' FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = %(slot)s::name

-- name: forget_slot
-- Removes a slot that is of no use any more, unless somebody reads it.
SELECT pg_catalog.pg_drop_replication_slot(s.slot_name) FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = %(slot)s::name AND NOT s.active

-- name: slot
-- From now on the server keeps its WAL until the relay has seen it.
SELECT pg_catalog.pg_create_logical_replication_slot(%(slot)s::name, 'pgoutput') IS NOT NULL

-- name: place
-- Where the log ends, in bytes from its beginning.
SELECT pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_insert_lsn(), '0/0')::bigint

-- name: present
-- Which of these rows this snapshot sees.
SELECT o.id FROM pgqueue.outbox o WHERE o.id = ANY (%(ids)s::bigint[])

-- name: committing
-- How many of these transactions are still about to become visible: the log may tell of a commit before any snapshot sees it.
SELECT count(*) FROM pg_catalog.pg_locks l
WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.transactionid::text::bigint = ANY (%(xids)s::bigint[])
