-- Read-only looks at the database.

-- name: settings
SELECT current_setting('server_version_num')::int, current_setting('server_version'), current_setting('synchronous_commit'),
  current_setting('fsync'), current_setting('full_page_writes'), current_setting('max_connections')::int
    - current_setting('superuser_reserved_connections')::int - coalesce(current_setting('reserved_connections', true)::int, 0),
  (SELECT count(*) FROM pg_catalog.pg_stat_activity a WHERE a.backend_type = 'client backend'
     OR (a.backend_type IS NULL AND a.usesysid IS NOT NULL AND a.datname IS NOT NULL)) -- of another role, and hidden

-- name: holders
-- Who keeps vacuum from cleaning up: the oldest snapshot first. Ages in transactions, times in seconds. Sessions of other roles
-- show only to members of pg_read_all_stats: the last row counts those that are hidden.
(SELECT h.kind, h.who, h.detail, h.age_s, h.age_xids FROM (
  SELECT 'session' AS kind, format('pid %%s', a.pid) AS who,
    format('%%s, application %%s, role %%s%%s', coalesce(nullif(a.backend_type, 'client backend'), a.state, 'state unknown'), coalesce(nullif(a.application_name, ''), 'unnamed'), a.usename,
      CASE WHEN a.state LIKE 'idle in transaction%%' THEN format(', idle for %%s s', round(extract(epoch FROM clock_timestamp() - a.state_change)))
           WHEN a.query_start IS NOT NULL THEN format(', query running for %%s s', round(extract(epoch FROM clock_timestamp() - a.query_start))) END) AS detail,
    extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, a.state_change))::double precision AS age_s, -- walsenders do not tell the first
    greatest(age(a.backend_xmin), age(a.backend_xid))::bigint AS age_xids
  FROM pg_catalog.pg_stat_activity a
  WHERE a.backend_type <> 'autovacuum worker' AND a.leader_pid IS NULL AND a.pid <> pg_catalog.pg_backend_pid() AND a.datname = current_database()
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_replication r WHERE r.pid = a.pid AND r.state <> 'startup')
    AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
  UNION ALL
  SELECT 'prepared transaction', format('%%L', p.gid), format('owner %%s', p.owner),
    extract(epoch FROM clock_timestamp() - p.prepared)::double precision, age(p.transaction)::bigint
  FROM pg_catalog.pg_prepared_xacts p WHERE p.database = current_database()
  UNION ALL
  SELECT 'replication slot', format('%%L', s.slot_name), format('%%s, %%s', s.slot_type, CASE WHEN s.active THEN 'active' ELSE 'not active' END),
    NULL, greatest(age(s.xmin), age(s.catalog_xmin))::bigint
  FROM pg_catalog.pg_replication_slots s WHERE s.xmin IS NOT NULL
  UNION ALL
  SELECT 'standby', coalesce(nullif(r.application_name, ''), 'unnamed'), 'hot_standby_feedback', NULL, age(r.backend_xmin)::bigint
  FROM pg_catalog.pg_stat_replication r WHERE r.backend_xmin IS NOT NULL AND r.state <> 'startup') h
ORDER BY h.age_xids DESC NULLS LAST, h.age_s DESC NULLS LAST LIMIT 5)
UNION ALL
SELECT 'hidden', format('%%I', current_user), count(*)::text, NULL, NULL
FROM pg_catalog.pg_stat_activity a LEFT JOIN pg_catalog.pg_stat_replication r ON r.pid = a.pid
WHERE a.backend_type IS NULL AND a.usesysid IS NOT NULL AND a.pid <> pg_catalog.pg_backend_pid()
  AND (a.datname = current_database() OR r.pid IS NOT NULL)
HAVING count(*) > 0

-- name: waiting
-- What waits, by queue and name, and whether a live worker of that queue knows the name.
SELECT j.queue, j.name, count(*),
  EXISTS (SELECT FROM pgqueue.workers w WHERE w.alive AND j.queue = ANY (w.queues)),
  EXISTS (SELECT FROM pgqueue.workers w WHERE w.alive AND j.queue = ANY (w.queues) AND j.name = ANY (w.names)),
  coalesce((SELECT q.paused FROM pgqueue.queue q WHERE q.name = j.queue), false) OR coalesce((SELECT t.paused FROM pgqueue.job_type t WHERE t.name = j.name), false)
FROM pgqueue.job j WHERE j.lease = 0 AND (j.run_at IS NULL OR j.run_at <= now()) GROUP BY j.queue, j.name ORDER BY 3 DESC

-- name: limits
-- Job types with a limit whose jobs wait in several queues, each of which has slots of its own.
SELECT j.name, array_agg(DISTINCT j.queue ORDER BY j.queue) FROM pgqueue.job j
WHERE j.name IN (SELECT t.name FROM pgqueue.job_type t WHERE t.slots IS NOT NULL) AND j.lease = 0
GROUP BY j.name HAVING count(DISTINCT j.queue) > 1 ORDER BY j.name

-- name: keys
-- Ordering keys that dead letters block, whether jobs wait behind them, and the oldest such letter.
SELECT d.queue, count(DISTINCT d.key), bool_or(EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = d.queue AND j.key = d.key AND j.pos IS NOT NULL)), min(d.id)
FROM pgqueue.dead_job d WHERE d.blocks GROUP BY d.queue ORDER BY d.queue

-- name: fleets
-- Queues whose live workers do not know the same names.
SELECT u.queue, count(DISTINCT w.names), array_agg(DISTINCT w.host || ':' || w.pid)
FROM (SELECT w.host, w.pid, w.queues, ARRAY(SELECT n FROM unnest(w.names) n ORDER BY n) AS names FROM pgqueue.workers w WHERE w.alive) w
CROSS JOIN LATERAL unnest(w.queues) u(queue) GROUP BY u.queue HAVING count(DISTINCT w.names) > 1

-- name: sequences
-- Sequences against the highest number in use, and what each hands out at a time.
SELECT 'pgqueue.pos_seq', s.last_value, greatest((SELECT max(j.pos) FROM pgqueue.job j), (SELECT max(l.pos) FROM pgqueue.lane l)),
  (SELECT c.seqcache FROM pg_catalog.pg_sequence c WHERE c.seqrelid = 'pgqueue.pos_seq'::pg_catalog.regclass) FROM pgqueue.pos_seq s
UNION ALL
SELECT 'pgqueue.job_id_seq', s.last_value, greatest((SELECT max(j.id) FROM pgqueue.job j), (SELECT max(d.id) FROM pgqueue.dead_job d)),
  (SELECT c.seqcache FROM pg_catalog.pg_sequence c WHERE c.seqrelid = 'pgqueue.job_id_seq'::pg_catalog.regclass) FROM pgqueue.job_id_seq s
UNION ALL
SELECT 'pgqueue.outbox_id_seq', s.last_value, (SELECT max(o.id) FROM pgqueue.outbox o),
  (SELECT c.seqcache FROM pg_catalog.pg_sequence c WHERE c.seqrelid = 'pgqueue.outbox_id_seq'::pg_catalog.regclass) FROM pgqueue.outbox_id_seq s

-- name: tables
-- The hot tables: live and dead rows, bytes of the heap, when it was last cleaned.
SELECT t.relname, t.n_live_tup, t.n_dead_tup, pg_catalog.pg_relation_size(t.relid), greatest(t.last_vacuum, t.last_autovacuum)
FROM pg_catalog.pg_stat_all_tables t WHERE t.schemaname = 'pgqueue' AND t.relname IN ('job', 'lane', 'outbox', 'tally') ORDER BY t.relname

-- name: indexes
SELECT c.relname FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
WHERE c.relnamespace = 'pgqueue'::pg_catalog.regnamespace AND NOT i.indisvalid ORDER BY c.relname

-- name: publications
-- Publications of our tables, but for the one from which a relay hears of new events.
SELECT p.pubname, array_agg(p.tablename ORDER BY p.tablename) FROM pg_catalog.pg_publication_tables p
WHERE p.schemaname = 'pgqueue' AND (p.pubname, p.tablename) <> ('pgqueue_outbox', 'outbox') GROUP BY p.pubname ORDER BY p.pubname

-- name: slots
-- The replication slots of relays of this database: what log and which dead rows of the catalogs they keep.
SELECT s.slot_name, s.active, coalesce(s.wal_status, 'unknown'),
  pg_catalog.pg_wal_lsn_diff(CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_insert_lsn() END, s.restart_lsn)::bigint,
  age(s.catalog_xmin)::bigint
FROM pg_catalog.pg_replication_slots s
WHERE s.database = current_database() AND starts_with(s.slot_name, 'pgqueue_outbox_') ORDER BY s.slot_name

-- name: outbox
SELECT o.pending, o.parked, o.blocked_aggregates, o.oldest_pending_s, o.relays, o.orphan_partitions FROM pgqueue.outbox_lag o

-- name: batches
-- Batches whose members have ended and whose completion job could not be enqueued.
SELECT b.id, b.problem, format('UPDATE pgqueue.batch SET completion = NULL, retry_at = now() WHERE id = %%s', b.id)
FROM pgqueue.batch_status b WHERE b.retry_at IS NOT NULL ORDER BY b.id

-- name: schedules
SELECT s.name, s.state, s.problem, s.late_s FROM pgqueue.schedule_status s WHERE s.state IN ('broken', 'orphan') OR (s.state = 'active' AND s.late_s > 60) ORDER BY s.name
