-- name: cancel
-- Jobs that nobody holds go at once; a leased row is never locked, its worker is asked instead. A waiting row that
-- somebody has locked is being claimed at this moment: the request reaches whoever claims it.
WITH l AS MATERIALIZED (
  SELECT j.id FROM pgqueue.job j WHERE j.id = ANY (%(ids)s::bigint[]) AND j.lease = 0 ORDER BY j.id FOR UPDATE SKIP LOCKED),
d AS (DELETE FROM pgqueue.job j USING l WHERE j.id = l.id RETURNING j.*),
b AS (
  INSERT INTO pgqueue.batch_tally (batch_id, outcome, n)
  SELECT m.batch, 'gone', count(*) FROM (SELECT pgqueue.batch_of(d.headers) AS batch FROM d WHERE d.headers IS NOT NULL) m WHERE m.batch IS NOT NULL GROUP BY m.batch),
h AS (
  INSERT INTO pgqueue.job_history (id, until, outcome, name, queue, priority, key, attempt, enqueued_at, started_at, headers, payload)
  SELECT d.id, u.until, 'cancelled', d.name, d.queue, d.priority, d.key, d.attempt, d.enqueued_at, nullif(d.claimed_at, '-infinity'), d.headers, d.payload
  FROM d JOIN pgqueue.job_type k ON k.name = d.name CROSS JOIN LATERAL (SELECT pgqueue.history_until(k.keep_s) AS until) u WHERE u.until IS NOT NULL),
s AS (DELETE FROM pgqueue.job_signal s USING d WHERE s.job_id = d.id),
a AS (DELETE FROM pgqueue.attempt_log g USING d WHERE g.job_id = d.id),
t AS (INSERT INTO pgqueue.tally (queue, name, outcome, n) SELECT d.queue, d.name, 'cancelled', count(*) FROM d GROUP BY d.queue, d.name),
r AS (
  INSERT INTO pgqueue.job_signal (job_id)
  SELECT j.id FROM pgqueue.job j WHERE j.id = ANY (%(ids)s::bigint[]) AND NOT EXISTS (SELECT FROM d WHERE d.id = j.id)
  ORDER BY j.id ON CONFLICT DO NOTHING)
SELECT i.id, CASE
  WHEN EXISTS (SELECT FROM d WHERE d.id = i.id) THEN 'cancelled'
  WHEN EXISTS (SELECT FROM pgqueue.job j WHERE j.id = i.id) THEN 'requested'
  WHEN EXISTS (SELECT FROM pgqueue.dead_job k WHERE k.id = i.id) THEN 'dead'
  ELSE 'gone' END
FROM unnest(%(ids)s::bigint[]) WITH ORDINALITY i(id, n) ORDER BY i.n

-- name: waiting
-- The next n jobs of a name (or queue) that nobody holds.
SELECT j.id FROM pgqueue.job j
WHERE j.lease = 0 AND j.id > %(after)s::bigint
  AND (%(name)s::text IS NULL OR j.name = %(name)s::text) AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
ORDER BY j.id LIMIT %(n)s::int

-- name: count
SELECT count(*) FROM pgqueue.job j
WHERE j.lease = 0 AND (%(name)s::text IS NULL OR j.name = %(name)s::text) AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
