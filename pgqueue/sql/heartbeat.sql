-- name: heartbeat
-- Extend the deadlines that have less than half of a lease left; the lease grows with the job's age, so that a job of
-- hours is not rewritten every ten seconds. Rows locked by somebody else are passed. Returns the claims that stand.
WITH mine AS MATERIALIZED (
  SELECT j.id, j.ctid, j.lease,
    j.deadline < clock_timestamp() + least(greatest(%(visibility)s::interval, (clock_timestamp() - j.claimed_at) / 4), interval '5 min') / 2 AS due
  FROM unnest(%(ids)s::bigint[], %(leases)s::bigint[]) x(id, lease) JOIN pgqueue.job j ON j.id = x.id AND j.lease = x.lease),
l AS MATERIALIZED (
  SELECT y.ctid FROM (SELECT mine.* FROM mine WHERE mine.due ORDER BY mine.id) m
  CROSS JOIN LATERAL (
    SELECT j.ctid FROM pgqueue.job j WHERE j.ctid = m.ctid AND j.id = m.id AND j.lease = m.lease
    FOR NO KEY UPDATE SKIP LOCKED) y),
u AS (
  UPDATE pgqueue.job j SET deadline = clock_timestamp() + least(greatest(%(visibility)s::interval, (clock_timestamp() - j.claimed_at) / 4), interval '5 min')
  FROM l WHERE j.ctid = l.ctid)
SELECT mine.id FROM mine

-- name: lane_heartbeat
-- Keep the lanes in hand, none shorter than a job in it.
WITH l AS MATERIALIZED (
  SELECT l.queue, l.key, l.slot FROM unnest(%(queues)s::text[], %(keys)s::text[], %(leases)s::bigint[]) t(q, k, lease)
  CROSS JOIN LATERAL (SELECT l.queue, l.key, l.slot FROM pgqueue.lane l WHERE l.queue = t.q AND l.key = t.k AND l.lease = t.lease
                      FOR NO KEY UPDATE SKIP LOCKED) l)
UPDATE pgqueue.lane l SET deadline = greatest(l.deadline, clock_timestamp() + %(visibility)s::interval,
  (SELECT max(j.deadline) FROM pgqueue.job j WHERE j.queue = l.queue AND j.key = l.key AND j.pos IS NOT NULL AND j.lease = l.lease))
FROM l AS x WHERE l.queue = x.queue AND l.key = x.key AND l.slot = x.slot

-- name: signals
-- Which of these jobs somebody asked to cancel.
SELECT s.job_id FROM pgqueue.job_signal s WHERE s.job_id = ANY (%(ids)s::bigint[])

-- name: register
-- This process start, under a nonce nobody has; no row comes back if the nonce is taken.
INSERT INTO pgqueue.worker (nonce, host, pid, version, queues, names, schedules, concurrency)
VALUES (%(nonce)s::bigint, %(host)s::text, %(pid)s::int, %(version)s::text, %(queues)s::text[], %(names)s::text[], %(schedules)s::text[], %(concurrency)s::int)
ON CONFLICT DO NOTHING RETURNING nonce

-- name: beat
-- This process is alive, for people who look; recovery never depends on it.
UPDATE pgqueue.worker SET beat_at = clock_timestamp(), in_flight = %(in_flight)s::int, overrun = %(overrun)s::int,
  draining = %(draining)s::boolean
WHERE nonce = %(nonce)s::bigint

-- name: unregister
DELETE FROM pgqueue.worker WHERE nonce = %(nonce)s::bigint

-- name: idle
-- Tell producers that somebody waits for the next few seconds. A sequence, not a row: no lock, no dead tuple.
SELECT pg_catalog.setval(s.seq::pg_catalog.regclass, (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 5000)
FROM (SELECT DISTINCT 'pgqueue.idle_' || pgqueue.bucket(q) AS seq FROM unnest(%(queues)s::text[]) q) s

-- name: channels
-- The notification channels of these queues.
SELECT DISTINCT 'pgqueue_' || pgqueue.bucket(q) FROM unnest(%(queues)s::text[]) q
