-- name: claim
-- Up to n jobs in level order. A level is a (queue, priority) pair; each is read from its floor, at most 5,000 entries.
-- Locks are taken in a second CTE, after the window; a plain IN (SELECT .. LIMIT ..) can be re-executed by a nested
-- loop and update more than n rows. The last row (level 0) carries what this snapshot says beside the jobs. A job that
-- somebody cancelled says so: every attempt begins with a claim, so none begins after that. Most of the time nothing is
-- cancelled, and the one look at the empty table is all it costs.
WITH w AS MATERIALIZED (
  SELECT v.o, x.ctid, x.pos, x.name
  FROM unnest(%(queues)s::text[], %(priorities)s::smallint[], %(floors)s::bigint[]) WITH ORDINALITY v(q, p, f, o)
  CROSS JOIN LATERAL (
    SELECT j.ctid, j.pos, j.name FROM pgqueue.job j
    WHERE j.queue = v.q AND j.priority = v.p AND j.pos > v.f AND j.key IS NULL AND j.lease = 0 AND j.lost = 0
    ORDER BY j.pos LIMIT 5000) x),
c AS MATERIALIZED (
  SELECT w.o, y.ctid FROM w
  CROSS JOIN LATERAL (
    SELECT j.ctid FROM pgqueue.job j WHERE j.ctid = w.ctid AND j.pos = w.pos AND j.lease = 0 AND j.lost = 0
    FOR NO KEY UPDATE SKIP LOCKED) y
  WHERE w.name = ANY (%(names)s::text[]) LIMIT %(n)s::int),
u AS (
  UPDATE pgqueue.job j SET lease = %(lease)s::bigint, deadline = clock_timestamp() + %(visibility)s::interval,
    attempt = least(j.attempt + 1, 32767), claimed_at = statement_timestamp()
  FROM c WHERE j.ctid = c.ctid
  RETURNING c.o::int, j.pos, j.id, j.lease, j.name, j.key, j.attempt, timestamptz_send(j.enqueued_at),
    CASE WHEN num_nonnulls(j.idempotency_key, j.max_attempts, j.timeout_s, j.expires_at, j.backoff, j.headers, j.deferred) > 0
           OR ((SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = j.id)) THEN
      json_build_object('idempotency_key', j.idempotency_key, 'max_attempts', j.max_attempts, 'timeout_s', j.timeout_s::text,
        'expired', j.expires_at <= statement_timestamp(), 'backoff', j.backoff, 'headers', j.headers, 'deferred', j.deferred,
        'cancelled', (SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = j.id))::text END,
    j.payload::text)
SELECT * FROM u
UNION ALL
SELECT 0, 0, 0, 0, '', NULL, 0::smallint, '\\x',
  CASE WHEN (SELECT count(*) FROM u) < %(n)s::int
    THEN (SELECT json_object_agg(a.o, a.p)::text FROM (SELECT w.o, max(w.pos) AS p FROM w GROUP BY w.o HAVING count(*) = 5000) a) END,
  (SELECT (bool_or(EXISTS (SELECT FROM pgqueue.lane l WHERE l.queue = r.q))
        OR bool_or(EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = r.q AND j.pos > r.f AND j.pos > 0 AND j.key IS NOT NULL)))::int::text
   FROM unnest(%(route_queues)s::text[], %(route_floors)s::bigint[]) r(q, f))

-- name: claim_backlog
-- The next n jobs of a backlog, in level order: what `claim` does, for as long as it keeps finding all it asked for. It
-- locks n rows where they stand in the index, whatever their names, and takes those of names known here; n bounds both.
-- One array of ctids, because a join looks up the size of the table again for every row. A row whose xmax is a transaction
-- that runs, or began after this statement, is locked or taken: that is seen at once, while SKIP LOCKED asks the lock table,
-- for each of the 500 rows that another worker's claim holds. What the look lets through SKIP LOCKED decides.
UPDATE pgqueue.job j SET lease = %(lease)s::bigint, deadline = clock_timestamp() + %(visibility)s::interval,
  attempt = least(j.attempt + 1, 32767), claimed_at = statement_timestamp()
WHERE j.name = ANY (%(names)s::text[]) AND j.ctid = ANY (ARRAY (
  SELECT x.ctid
  FROM unnest(%(queues)s::text[], %(priorities)s::smallint[], %(floors)s::bigint[]) v(q, p, f)
  CROSS JOIN LATERAL (
    SELECT j.ctid FROM pgqueue.job j
    WHERE j.queue = v.q AND j.priority = v.p AND j.pos > v.f AND j.key IS NULL AND j.lease = 0 AND j.lost = 0
      AND age(j.xmax) > (SELECT age(pg_snapshot_xmax(pg_current_snapshot())::xid))
      AND j.xmax <> ALL (ARRAY (SELECT x::xid FROM pg_snapshot_xip(pg_current_snapshot()) x))
    ORDER BY j.pos LIMIT %(n)s::int FOR NO KEY UPDATE SKIP LOCKED) x LIMIT %(n)s::int))
RETURNING CASE WHEN cardinality(%(order)s::text[]) > 1 THEN 10 * array_position(%(order)s::text[], j.queue) - 9 ELSE 1 END + j.priority,
  j.pos, j.id, j.lease, j.name, j.key, j.attempt, timestamptz_send(j.enqueued_at),
  CASE WHEN num_nonnulls(j.idempotency_key, j.max_attempts, j.timeout_s, j.expires_at, j.backoff, j.headers, j.deferred) > 0
         OR ((SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = j.id)) THEN
    json_build_object('idempotency_key', j.idempotency_key, 'max_attempts', j.max_attempts, 'timeout_s', j.timeout_s::text,
      'expired', j.expires_at <= statement_timestamp(), 'backoff', j.backoff, 'headers', j.headers, 'deferred', j.deferred,
      'cancelled', (SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = j.id))::text END,
  j.payload::text

-- name: claim_few
-- The first look of an idle worker that was called: what `claim` does, with fewer plan nodes to start, which is most of
-- the time of a claim of one job. It examines what `claim` examines, but tells neither where a window was full nor whether keyed jobs wait.
UPDATE pgqueue.job j SET lease = %(lease)s::bigint, deadline = clock_timestamp() + %(visibility)s::interval,
  attempt = least(j.attempt + 1, 32767), claimed_at = statement_timestamp()
WHERE j.ctid = ANY (ARRAY (
  SELECT y.ctid
  FROM unnest(%(queues)s::text[], %(priorities)s::smallint[], %(floors)s::bigint[]) v(q, p, f)
  CROSS JOIN LATERAL (
    SELECT j.ctid, j.pos, j.name FROM pgqueue.job j
    WHERE j.queue = v.q AND j.priority = v.p AND j.pos > v.f AND j.key IS NULL AND j.lease = 0 AND j.lost = 0
    ORDER BY j.pos LIMIT 5000) x
  CROSS JOIN LATERAL (
    SELECT j.ctid FROM pgqueue.job j WHERE j.ctid = x.ctid AND j.pos = x.pos AND j.lease = 0 AND j.lost = 0
    FOR NO KEY UPDATE SKIP LOCKED) y
  WHERE x.name = ANY (%(names)s::text[]) LIMIT %(n)s::int))
RETURNING CASE WHEN cardinality(%(order)s::text[]) > 1 THEN 10 * array_position(%(order)s::text[], j.queue) - 9 ELSE 1 END + j.priority,
  j.pos, j.id, j.lease, j.name, j.key, j.attempt, timestamptz_send(j.enqueued_at),
  CASE WHEN num_nonnulls(j.idempotency_key, j.max_attempts, j.timeout_s, j.expires_at, j.backoff, j.headers, j.deferred) > 0
         OR ((SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = j.id)) THEN
    json_build_object('idempotency_key', j.idempotency_key, 'max_attempts', j.max_attempts, 'timeout_s', j.timeout_s::text,
      'expired', j.expires_at <= statement_timestamp(), 'backoff', j.backoff, 'headers', j.headers, 'deferred', j.deferred,
      'cancelled', (SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = j.id))::text END,
  j.payload::text

-- name: claiming
-- What a round that only claims needs. A claim that a crash of the server undoes is one that any crash undoes: the job is
-- claimed again.
SELECT pg_catalog.set_config('lock_timeout', '250ms', true), pg_catalog.set_config('synchronous_commit', 'off', true)

-- name: keyed
-- Whether keyed jobs may be waiting: a lane is there, or a keyed job stands above the floor of routing.
SELECT bool_or(EXISTS (SELECT FROM pgqueue.lane l WHERE l.queue = r.q))
    OR bool_or(EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = r.q AND j.pos > r.f AND j.pos > 0 AND j.key IS NOT NULL))
FROM unnest(%(route_queues)s::text[], %(route_floors)s::bigint[]) r(q, f)

-- name: suspects
-- Jobs whose worker was lost (its lease ran out), by how often that has happened; only ever in a sweep. ceilings bound
-- the scan: without them each sweep reads the waiting backlog.
WITH c AS MATERIALIZED (
  SELECT v.o, x.id FROM unnest(%(queues)s::text[], %(priorities)s::smallint[], %(ceilings)s::bigint[]) WITH ORDINALITY v(q, p, f, o)
  CROSS JOIN LATERAL (
    SELECT j.id FROM pgqueue.job j
    WHERE j.queue = v.q AND j.priority = v.p AND j.pos <= v.f AND j.key IS NULL AND (j.lease <> 0 OR j.lost > 0)
      AND j.deadline <= statement_timestamp() AND j.lost BETWEEN %(low)s::int AND %(high)s::int AND j.name = ANY (%(names)s::text[])
    ORDER BY j.pos LIMIT %(n)s::int FOR NO KEY UPDATE SKIP LOCKED) x
  LIMIT %(n)s::int),
u AS (
  UPDATE pgqueue.job j SET lease = %(lease)s::bigint, deadline = clock_timestamp() + %(visibility)s::interval,
    attempt = least(j.attempt + 1, 32767), lost = j.lost + (j.lease <> 0)::int, claimed_at = statement_timestamp()
  FROM c, LATERAL (SELECT o.lease, o.claimed_at FROM pgqueue.job o WHERE o.id = c.id) before WHERE j.id = c.id
  RETURNING c.o::int, j.pos, j.id, j.lease, j.name, j.key, j.attempt, timestamptz_send(j.enqueued_at) AS enqueued,
    json_build_object('lost', j.lost, 'idempotency_key', j.idempotency_key, 'max_attempts', j.max_attempts, 'timeout_s', j.timeout_s::text,
      'expired', j.expires_at <= statement_timestamp(), 'backoff', j.backoff, 'headers', j.headers,
      'cancelled', (SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = j.id))::text AS extra,
    j.payload::text AS payload, before.lease AS before, before.claimed_at AS since),
a AS (
  INSERT INTO pgqueue.attempt_log (job_id, attempt, outcome, lease, started_at, error_type, error, worker)
  SELECT u.id, u.attempt - 1, 'lost', u.before, u.since, 'WorkerLost', 'the worker vanished: its lease ran out unrenewed',
         (SELECT k.host || ':' || k.pid FROM pgqueue.worker k WHERE k.nonce = u.before >> 32)
  FROM u WHERE u.before <> 0)
SELECT u.o, u.pos, u.id, u.lease, u.name, u.key, u.attempt, u.enqueued, u.extra, u.payload FROM u

-- name: suspects_alone
-- Whether a job that was lost more than once waits to be run with nothing beside it.
SELECT EXISTS (
  SELECT FROM unnest(%(queues)s::text[], %(priorities)s::smallint[], %(ceilings)s::bigint[]) v(q, p, f)
  CROSS JOIN LATERAL (
    SELECT FROM pgqueue.job j
    WHERE j.queue = v.q AND j.priority = v.p AND j.pos <= v.f AND j.key IS NULL AND (j.lease <> 0 OR j.lost > 0)
      AND j.deadline <= statement_timestamp() AND j.lost >= 1 AND j.name = ANY (%(names)s::text[]) LIMIT 1) x)

-- name: elect
-- Whether this session may stand for a suspect: one of all that serve these queues does.
SELECT pg_try_advisory_lock(1885827445, hashtext('alone ' || array_to_string(%(queues)s::text[], ',')))

-- name: resign
SELECT pg_advisory_unlock(1885827445, hashtext('alone ' || array_to_string(%(queues)s::text[], ',')))

-- name: reclaim
-- Claims that a crash of the server undid, of jobs that are in hand: made again, under the leases they had. Who claimed one of
-- them first has it; the row tells by its attempt.
WITH t AS MATERIALIZED (
  SELECT o.at, t.lease FROM unnest(%(lane_queues)s::text[], %(lane_keys)s::text[], %(places)s::bigint[], %(lane_leases)s::bigint[]) t(q, k, p, lease)
  CROSS JOIN LATERAL (SELECT l.ctid AS at FROM pgqueue.lane l WHERE l.queue = t.q AND l.key = t.k AND l.pos = t.p AND l.lease = 0 FOR NO KEY UPDATE SKIP LOCKED) o),
l AS (
  UPDATE pgqueue.lane l SET lease = t.lease, deadline = clock_timestamp() + %(visibility)s::interval FROM t WHERE l.ctid = t.at),
g AS MATERIALIZED (
  SELECT o.at, x.lease, x.attempt FROM unnest(%(ids)s::bigint[], %(leases)s::bigint[], %(attempts)s::smallint[]) x(id, lease, attempt)
  CROSS JOIN LATERAL (SELECT j.ctid AS at FROM pgqueue.job j WHERE j.id = x.id AND j.lease = 0 AND j.attempt = x.attempt - 1 FOR NO KEY UPDATE SKIP LOCKED) o)
UPDATE pgqueue.job j SET lease = g.lease, deadline = clock_timestamp() + %(visibility)s::interval, attempt = g.attempt, claimed_at = statement_timestamp()
FROM g WHERE j.ctid = g.at RETURNING j.id

-- name: horizon
-- The observation behind every floor: last number drawn, then who still holds the sequence (the order matters).
SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END, h.holders, extract(epoch FROM clock_timestamp() - statement_timestamp())::double precision AS cost
FROM pgqueue.pos_seq s
CROSS JOIN LATERAL (
  SELECT coalesce(array_agg(DISTINCT l.virtualtransaction), '{}') AS holders FROM pg_catalog.pg_locks l
  WHERE s.last_value IS NOT NULL AND l.locktype = 'relation' AND l.relation = 'pgqueue.pos_seq'::pg_catalog.regclass
    AND l.mode = 'RowExclusiveLock' AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())) h

-- name: paused
-- Queues and names that are not to be claimed now, and queues that are claimed through their gate.
SELECT 'queue', q.name FROM pgqueue.queue q WHERE q.paused
UNION ALL
SELECT 'name', t.name FROM pgqueue.job_type t WHERE t.paused
UNION ALL
SELECT 'gate', q.name FROM pgqueue.queue q WHERE num_nonnulls(q.slots, q.rate_per_s) > 0
