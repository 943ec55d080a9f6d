-- name: route
-- Make sure that each key seen above the floors has its lane; a transaction of its own, before the round.
SELECT ord, examined, last_pos FROM pgqueue.route(%(queues)s::text[], %(floors)s::bigint[])

-- name: lane_claim
-- Take up to k lanes and hand out at most m jobs of each, oldest first, at most total jobs in all.
SELECT ord::int, lane_pos, id, %(lease)s::bigint, name, key, attempt, timestamptz_send(enqueued_at),
  CASE WHEN lost > 0 OR num_nonnulls(idempotency_key, max_attempts, timeout_s, expires_at, backoff, headers) > 0
         OR (attempt > 1 AND (SELECT j.deferred FROM pgqueue.job j WHERE j.id = lane_claim.id))
         OR ((SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = id)) THEN
    json_build_object('lost', lost, 'idempotency_key', idempotency_key, 'max_attempts', max_attempts, 'timeout_s', timeout_s::text,
      'expired', expires_at <= statement_timestamp(), 'backoff', backoff::json, 'headers', headers::json,
      'deferred', attempt > 1 AND (SELECT j.deferred FROM pgqueue.job j WHERE j.id = lane_claim.id),
      'cancelled', (SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = id))::text END, payload
FROM pgqueue.lane_claim(%(queues)s::text[], %(priorities)s::smallint[], %(floors)s::bigint[], %(names)s::text[],
                        %(k)s::int, %(m)s::int, %(total)s::int, %(lease)s::bigint, %(visibility)s::interval)

-- name: lane_take
-- The next k lanes of a backlog, in level order: what `lane_claim` takes as long as it keeps finding all it asked for, up to the
-- first lane that is not common (that was lost, or stands for a limit). Which they are `lane_jobs` reads from the transaction.
WITH l AS (
  UPDATE pgqueue.lane l SET lease = %(lease)s::bigint, deadline = clock_timestamp() + %(visibility)s::interval
  WHERE l.ctid = ANY (ARRAY (
    SELECT f.at FROM (
      SELECT y.at, bool_and(y.common) OVER (ORDER BY y.o, y.pos ROWS UNBOUNDED PRECEDING) AS front FROM (
        SELECT v.o, x.at, x.pos, x.common FROM unnest(%(queues)s::text[], %(priorities)s::smallint[], %(floors)s::bigint[]) WITH ORDINALITY v(q, p, f, o)
        CROSS JOIN LATERAL (
          SELECT l.ctid AS at, l.pos, l.lease = 0 AND l.lost = 0 AND NOT starts_with(l.key, '@') AS common FROM pgqueue.lane l
          WHERE l.queue = v.q AND l.priority = v.p AND l.priority >= 0 AND l.wake_at IS NULL AND l.pos > v.f
            AND l.deadline <= statement_timestamp() AND l.rest_until <= statement_timestamp() AND l.head_name = ANY (%(names)s::text[])
          ORDER BY l.pos LIMIT %(k)s::int FOR NO KEY UPDATE SKIP LOCKED) x
        LIMIT %(k)s::int) y) f
    WHERE f.front))
  RETURNING CASE WHEN cardinality(%(order)s::text[]) > 1 THEN 10 * array_position(%(order)s::text[], l.queue) - 9 ELSE 1 END + l.priority AS level,
    l.pos, l.queue, l.key)
SELECT l.level, l.pos, l.queue, l.key FROM l
UNION ALL
SELECT 0, 0, set_config('pgqueue.lane_queues', coalesce(array_agg(s.queue)::text, ''), true), set_config('pgqueue.lane_keys', coalesce(array_agg(s.key)::text, ''), true)
FROM (SELECT l.queue, l.key FROM l ORDER BY l.level, l.pos) s

-- name: lane_jobs
-- Of each lane that `lane_take` has just taken, at most m jobs, oldest first, at most `total` in all, none behind one that may not
-- run or that somebody has locked. A statement of its own, since what may run is seen when the lane is held. A lane that
-- hands out nothing is free again where it stood; `lane_claim` finds out what it needs.
WITH t AS MATERIALIZED (
  SELECT u.q, u.k, u.n FROM unnest(nullif(current_setting('pgqueue.lane_queues', true), '')::text[], nullif(current_setting('pgqueue.lane_keys', true), '')::text[]) WITH ORDINALITY u(q, k, n)),
h AS MATERIALIZED (
  SELECT t.n, x.id, x.tid, x.ours FROM t
  CROSS JOIN LATERAL (
    SELECT j.id, j.ctid AS tid, j.lease = 0 AND j.name = ANY (%(names)s::text[]) AS ours FROM pgqueue.job j
    WHERE j.queue = t.q AND j.key = t.k AND j.pos IS NOT NULL ORDER BY j.id LIMIT %(m)s::int) x
  WHERE NOT EXISTS (SELECT FROM pgqueue.dead_job d WHERE d.queue = t.q AND d.key = t.k AND d.blocks)
  LIMIT %(total)s::int),
g AS MATERIALIZED (
  SELECT j.ctid AS tid FROM pgqueue.job j
  WHERE j.ctid = ANY (ARRAY (SELECT h.tid FROM h WHERE h.ours)) AND j.lease = 0 FOR NO KEY UPDATE SKIP LOCKED),
-- Mostly all are ours and got their lock, where they stood; a scan by ctid goes in their order. Else none behind one that did not.
w AS MATERIALIZED (SELECT ARRAY (SELECT h.tid FROM h ORDER BY h.tid) = ARRAY (SELECT g.tid FROM g) AS whole),
f AS MATERIALIZED (
  SELECT z.n, z.tid FROM w CROSS JOIN LATERAL (
    SELECT h.n, h.tid, bool_and(h.tid IN (SELECT g.tid FROM g)) OVER (PARTITION BY h.n ORDER BY h.id) AS unbroken FROM h) z
  WHERE NOT w.whole AND z.unbroken),
free AS (
  UPDATE pgqueue.lane l SET lease = 0, deadline = '-infinity'
  WHERE l.ctid = ANY (ARRAY (
    SELECT y.at FROM t CROSS JOIN LATERAL (SELECT l.ctid AS at FROM pgqueue.lane l WHERE l.queue = t.q AND l.key = t.k AND l.slot = 0 OFFSET 0) y
    WHERE t.n <> ALL (ARRAY (SELECT DISTINCT h.n FROM h WHERE (SELECT w.whole FROM w) UNION ALL SELECT f.n FROM f)))))
UPDATE pgqueue.job j SET lease = %(lease)s::bigint, deadline = clock_timestamp() + %(visibility)s::interval,
  attempt = least(j.attempt + 1, 32767), claimed_at = statement_timestamp()
WHERE j.ctid = ANY (ARRAY (SELECT g.tid FROM g WHERE (SELECT w.whole FROM w) UNION ALL SELECT f.tid FROM f))
RETURNING CASE WHEN cardinality(%(order)s::text[]) > 1 THEN 10 * array_position(%(order)s::text[], j.queue) - 9 ELSE 1 END + j.priority,
  j.pos, j.id, j.lease, j.name, j.key, j.attempt, timestamptz_send(j.enqueued_at),
  CASE WHEN j.lost > 0 OR num_nonnulls(j.idempotency_key, j.max_attempts, j.timeout_s, j.expires_at, j.backoff, j.headers, j.deferred) > 0
         OR ((SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = j.id)) THEN
    json_build_object('lost', j.lost, 'idempotency_key', j.idempotency_key, 'max_attempts', j.max_attempts, 'timeout_s', j.timeout_s::text,
      'expired', j.expires_at <= statement_timestamp(), 'backoff', j.backoff, 'headers', j.headers, 'deferred', j.deferred,
      'cancelled', (SELECT EXISTS (SELECT FROM pgqueue.job_signal)) AND EXISTS (SELECT FROM pgqueue.job_signal s WHERE s.job_id = j.id))::text END,
  j.payload::text

-- name: lane_release
-- Give lanes back; a lane without a job is deleted. wait keeps it from being claimed for so long.
SELECT pgqueue.lane_release(%(queues)s::text[], %(keys)s::text[], %(places)s::bigint[], %(lease)s::bigint, %(wait)s::interval)

-- name: lanes_mine
-- Lanes that were not given back, because somebody had them locked.
SELECT l.queue, l.key, l.pos FROM unnest(%(queues)s::text[], %(keys)s::text[], %(places)s::bigint[]) t(q, k, p)
CROSS JOIN LATERAL (SELECT l.queue, l.key, l.pos FROM pgqueue.lane l
                    WHERE l.queue = t.q AND l.key = t.k AND l.pos = t.p AND l.lease = %(lease)s::bigint) l
