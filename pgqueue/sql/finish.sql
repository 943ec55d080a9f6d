-- name: ack
-- The jobs are done: delete them, count them. One row locked by somebody else blocks this one, so it runs under
-- lock_timeout; ack_skip is the form that passes such rows. The answer is NULL unless some were not ours any more.
WITH d AS (
  DELETE FROM pgqueue.job j USING unnest(%(ids)s::bigint[], %(leases)s::bigint[]) x(id, lease)
  WHERE j.id = x.id AND j.lease = x.lease
  RETURNING j.id, j.queue, j.name, j.claimed_at - greatest(j.enqueued_at, j.ready_at) AS wait),
t AS (
  INSERT INTO pgqueue.tally (queue, name, outcome, n, wait_s)
  SELECT d.queue, d.name, 'ok', count(*), extract(epoch FROM sum(d.wait)) FROM d GROUP BY d.queue, d.name)
SELECT CASE WHEN count(*) < cardinality(%(ids)s::bigint[]) THEN coalesce(array_agg(d.id), '{}') END FROM d

-- name: ack_batch
-- As ack, for jobs that one claim brought: one scan of the primary key instead of a look-up a job.
WITH d AS (
  DELETE FROM pgqueue.job j WHERE j.id = ANY (%(ids)s::bigint[]) AND j.lease = %(lease)s::bigint
  RETURNING j.id, j.queue, j.name, j.claimed_at - greatest(j.enqueued_at, j.ready_at) AS wait),
t AS (
  INSERT INTO pgqueue.tally (queue, name, outcome, n, wait_s)
  SELECT d.queue, d.name, 'ok', count(*), extract(epoch FROM sum(d.wait)) FROM d GROUP BY d.queue, d.name)
SELECT CASE WHEN count(*) < cardinality(%(ids)s::bigint[]) THEN coalesce(array_agg(d.id), '{}') END FROM d

-- name: ack_skip
-- As ack, passing rows that somebody else has locked.
WITH l AS MATERIALIZED (
  SELECT j.id FROM unnest(%(ids)s::bigint[], %(leases)s::bigint[]) x(id, lease)
  CROSS JOIN LATERAL (SELECT j.id FROM pgqueue.job j WHERE j.id = x.id AND j.lease = x.lease FOR UPDATE SKIP LOCKED) j ORDER BY j.id),
d AS (
  DELETE FROM pgqueue.job j USING l WHERE j.id = l.id
  RETURNING j.id, j.queue, j.name, j.claimed_at - greatest(j.enqueued_at, j.ready_at) AS wait),
t AS (
  INSERT INTO pgqueue.tally (queue, name, outcome, n, wait_s)
  SELECT d.queue, d.name, 'ok', count(*), extract(epoch FROM sum(d.wait)) FROM d GROUP BY d.queue, d.name)
SELECT CASE WHEN count(*) < cardinality(%(ids)s::bigint[]) THEN coalesce(array_agg(d.id), '{}') END FROM d

-- name: complete
-- The jobs are done, and have more to write than that; everything in one transaction, fenced by lease.
SELECT pgqueue.complete(%(jobs)s::json, %(wait)s::boolean)

-- name: still_mine
-- Which of these claims still stand: one that is missing here was lost, one that is listed was only locked.
SELECT j.id FROM unnest(%(ids)s::bigint[], %(leases)s::bigint[]) x(id, lease)
JOIN pgqueue.job j ON j.id = x.id AND j.lease = x.lease

-- name: retry
-- Failed attempts that run again after wait, and retries that are put off without having run (put_off). A job with an
-- ordering key keeps its place, its lane waits instead; one whose key is a limit waits by itself, and its slot goes on. The rows
-- just locked are found by their ctid, and all others one by one: planned for a table that was empty, a join may read its whole index.
WITH l AS MATERIALIZED (
  SELECT x.*, j.at, j.claimed_at FROM json_to_recordset(%(failures)s::json) x(id bigint, lease bigint, wait double precision, outcome text, deferred boolean, error_type text, error text, traceback text)
  CROSS JOIN LATERAL (SELECT j.id, j.ctid AS at, j.claimed_at FROM pgqueue.job j WHERE j.id = x.id AND j.lease = x.lease FOR NO KEY UPDATE SKIP LOCKED) j ORDER BY x.id),
r AS (
  UPDATE pgqueue.job j SET lease = 0, deadline = '-infinity', lost = 0, deferred = nullif(l.deferred, false),
    pos = CASE WHEN NOT pgqueue.is_limit(j.key, j.name) THEN j.pos END,
    run_at = CASE WHEN j.key IS NULL OR pgqueue.is_limit(j.key, j.name) THEN clock_timestamp() + l.wait * interval '1 s' END,
    ready_at = clock_timestamp() + l.wait * interval '1 s'
  FROM l WHERE j.ctid = l.at RETURNING j.id, j.attempt, j.queue, j.name, CASE WHEN l.outcome = 'put_off' THEN 'put_off' WHEN l.deferred THEN 'deferred' ELSE 'retry' END AS kind),
t AS (
  INSERT INTO pgqueue.tally (queue, name, outcome, n)
  SELECT r.queue, r.name, r.kind, count(*) FROM r GROUP BY r.queue, r.name, r.kind),
a AS (
  INSERT INTO pgqueue.attempt_log (job_id, attempt, outcome, lease, started_at, worker, error_type, error, traceback)
  SELECT r.id, r.attempt, CASE l.outcome WHEN 'put_off' THEN 'retry' ELSE l.outcome END, l.lease, l.claimed_at, %(worker)s::text, l.error_type, l.error, l.traceback
  FROM r JOIN l ON l.id = r.id),
capped AS (
  DELETE FROM pgqueue.attempt_log g WHERE g.ctid = ANY (ARRAY (
    SELECT o.at FROM r CROSS JOIN LATERAL (SELECT o.ctid AS at FROM pgqueue.attempt_log o WHERE o.job_id = r.id AND o.attempt <= r.attempt - 50 OFFSET 0) o
    WHERE r.attempt > 50)))
SELECT r.id FROM r

-- name: bury
-- Jobs that cannot succeed: move them, with the log of their attempts, to the dead letters. One that ends without having
-- been run again (RetryBudget) shows the error that it last failed with. One that expired before it ran frees its dedup key.
WITH l AS MATERIALIZED (
  SELECT x.*, j.at FROM json_to_recordset(%(failures)s::json) x(id bigint, lease bigint, reason text, error_type text, error text, traceback text)
  CROSS JOIN LATERAL (SELECT j.id, j.ctid AS at FROM pgqueue.job j WHERE j.id = x.id AND j.lease = x.lease FOR UPDATE SKIP LOCKED) j ORDER BY x.id),
d AS (
  DELETE FROM pgqueue.job j USING l WHERE j.ctid = l.at RETURNING j.*, l.reason, l.error_type, l.error, l.traceback),
k AS (
  DELETE FROM pgqueue.effect f USING (
    SELECT e.at, d.id FROM d CROSS JOIN LATERAL (SELECT e.ctid AS at FROM pgqueue.effect e WHERE e.name = d.name AND e.key = d.idempotency_key OFFSET 0) e) o
  WHERE f.ctid = o.at AND f.job_id = o.id AND f.applied_at IS NULL),
f AS MATERIALIZED (
  SELECT y.queue, y.key FROM d
  CROSS JOIN LATERAL (
    SELECT f.queue, f.key FROM pgqueue.dedup f WHERE f.queue = d.queue AND f.key = d.dedup_key AND f.job_id = d.id FOR UPDATE SKIP LOCKED) y
  WHERE d.dedup_key IS NOT NULL AND d.attempt <= 1 AND d.reason = 'expired'),
free AS (DELETE FROM pgqueue.dedup f USING f AS y WHERE f.queue = y.queue AND f.key = y.key),
a AS (
  DELETE FROM pgqueue.attempt_log g WHERE g.job_id = ANY (ARRAY (SELECT d.id FROM d)) RETURNING g.*),
t AS (
  INSERT INTO pgqueue.tally (queue, name, outcome, n) SELECT d.queue, d.name, 'dead', count(*) FROM d GROUP BY d.queue, d.name)
INSERT INTO pgqueue.dead_job (id, queue, name, priority, key, dedup_key, idempotency_key, attempt, lost, max_attempts, timeout_s,
  backoff, headers, payload, enqueued_at, expires_at, first_attempt_at, last_attempt_at, reason, error_type, error, traceback, worker, trace_id, attempts, blocks)
SELECT d.id, d.queue, d.name, d.priority, d.key, d.dedup_key, d.idempotency_key, d.attempt, d.lost, d.max_attempts, d.timeout_s,
  d.backoff, d.headers, d.payload, d.enqueued_at, d.expires_at,
  least(nullif(d.claimed_at, '-infinity'), (SELECT min(a.started_at) FROM a WHERE a.job_id = d.id)), nullif(d.claimed_at, '-infinity'),
  d.reason, coalesce(e.error_type, d.error_type), coalesce(e.error, d.error), coalesce(e.traceback, d.traceback), %(worker)s::text,
  CASE WHEN d.headers IS NOT NULL THEN coalesce(pgqueue.json_at(d.headers, '{trace_id}'), nullif(split_part(pgqueue.json_at(d.headers, '{traceparent}'), '-', 2), '')) END,
  coalesce((SELECT json_agg(json_build_object('attempt', a.attempt, 'outcome', a.outcome, 'started_at', a.started_at, 'at', a.at,
    'worker', a.worker, 'error_type', a.error_type, 'error', a.error, 'traceback', a.traceback) ORDER BY a.at) FROM a WHERE a.job_id = d.id), '[]'),
  (NOT pgqueue.is_limit(d.key, d.name) AND EXISTS (SELECT FROM pgqueue.job_type k WHERE k.name = d.name AND k.on_dead = 'block')) IS TRUE
FROM d LEFT JOIN LATERAL (
  SELECT a.error_type, a.error, a.traceback FROM a
  WHERE d.error_type = 'RetryBudget' AND a.job_id = d.id AND a.error_type <> 'RetryBudget' ORDER BY a.at DESC LIMIT 1) e ON true
RETURNING id

-- name: snooze
-- Run again after wait; the attempt does not count. A keyed job keeps its place, its lane waits instead. The handler came
-- to an end, so the job is no suspect any more: one that polls by Snooze would else run alone for ever. Unless its attempts
-- are used up, by losses then, and this one came right after another loss: by turns it could kill workers for ever.
WITH l AS MATERIALIZED (
  SELECT x.* FROM unnest(%(ids)s::bigint[], %(leases)s::bigint[], %(waits)s::double precision[]) x(id, lease, wait)
  CROSS JOIN LATERAL (SELECT j.id FROM pgqueue.job j WHERE j.id = x.id AND j.lease = x.lease FOR NO KEY UPDATE SKIP LOCKED) j ORDER BY x.id)
UPDATE pgqueue.job j SET lease = 0, deadline = '-infinity', attempt = j.attempt - 1,
  lost = CASE WHEN j.lost > 0 AND j.attempt > coalesce(j.max_attempts, (SELECT t.max_attempts FROM pgqueue.job_type t WHERE t.name = j.name), 5)
    AND EXISTS (SELECT FROM pgqueue.attempt_log g WHERE g.job_id = j.id AND g.outcome = 'lost' AND g.at >= j.claimed_at) THEN j.lost ELSE 0 END,
  pos = CASE WHEN NOT pgqueue.is_limit(j.key, j.name) THEN j.pos END,
  run_at = CASE WHEN j.key IS NULL OR pgqueue.is_limit(j.key, j.name) THEN clock_timestamp() + l.wait * interval '1 s' END,
  ready_at = clock_timestamp() + l.wait * interval '1 s'
FROM l WHERE j.id = l.id RETURNING j.id

-- name: release
-- Give jobs back unstarted or unfinished; the attempt does not count and the place is kept.
WITH l AS MATERIALIZED (
  SELECT x.id FROM unnest(%(ids)s::bigint[], %(leases)s::bigint[]) x(id, lease)
  CROSS JOIN LATERAL (SELECT j.id FROM pgqueue.job j WHERE j.id = x.id AND j.lease = x.lease FOR NO KEY UPDATE SKIP LOCKED) j ORDER BY x.id)
UPDATE pgqueue.job j SET lease = 0, deadline = '-infinity', attempt = j.attempt - 1 FROM l WHERE j.id = l.id RETURNING j.id

-- name: drop
-- Cancelled jobs: their rows and signals go; those that had never begun free their dedup keys.
WITH l AS MATERIALIZED (
  SELECT x.id FROM unnest(%(ids)s::bigint[], %(leases)s::bigint[]) x(id, lease)
  CROSS JOIN LATERAL (SELECT j.id FROM pgqueue.job j WHERE j.id = x.id AND j.lease = x.lease FOR UPDATE SKIP LOCKED) j ORDER BY x.id),
d AS (DELETE FROM pgqueue.job j USING l WHERE j.id = l.id RETURNING j.*),
s AS (DELETE FROM pgqueue.job_signal s USING d WHERE s.job_id = d.id),
k AS (
  DELETE FROM pgqueue.effect f USING d WHERE f.name = d.name AND f.key = d.idempotency_key AND f.job_id = d.id AND f.applied_at IS NULL),
f AS MATERIALIZED (
  SELECT y.queue, y.key FROM d
  CROSS JOIN LATERAL (
    SELECT f.queue, f.key FROM pgqueue.dedup f WHERE f.queue = d.queue AND f.key = d.dedup_key AND f.job_id = d.id FOR UPDATE SKIP LOCKED) y
  WHERE d.dedup_key IS NOT NULL AND d.attempt <= 1 AND d.id = ANY (%(unbegun)s::bigint[])),
free AS (DELETE FROM pgqueue.dedup f USING f AS y WHERE f.queue = y.queue AND f.key = y.key),
b AS (
  INSERT INTO pgqueue.batch_tally (batch_id, outcome, n)
  SELECT m.batch, 'gone', count(*) FROM (SELECT pgqueue.batch_of(d.headers) AS batch FROM d WHERE d.headers IS NOT NULL) m WHERE m.batch IS NOT NULL GROUP BY m.batch),
h AS (
  INSERT INTO pgqueue.job_history (id, until, outcome, name, queue, priority, key, attempt, enqueued_at, started_at, headers, payload)
  SELECT d.id, u.until, 'cancelled', d.name, d.queue, d.priority, d.key, d.attempt, d.enqueued_at, nullif(d.claimed_at, '-infinity'), d.headers, d.payload
  FROM d JOIN pgqueue.job_type k ON k.name = d.name CROSS JOIN LATERAL (SELECT pgqueue.history_until(k.keep_s) AS until) u WHERE u.until IS NOT NULL),
a AS (DELETE FROM pgqueue.attempt_log g USING d WHERE g.job_id = d.id),
t AS (INSERT INTO pgqueue.tally (queue, name, outcome, n) SELECT d.queue, d.name, 'cancelled', count(*) FROM d GROUP BY d.queue, d.name)
SELECT d.id FROM d

-- name: nudge
-- Tell the other workers of these queues that rows below their floors are ready again.
SELECT pg_catalog.pg_notify(c.channel, 'below') FROM (
  SELECT DISTINCT 'pgqueue_' || pgqueue.bucket(q) AS channel FROM unnest(%(queues)s::text[]) q) c
