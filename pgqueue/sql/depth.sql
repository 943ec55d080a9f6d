-- name: sample
-- The gauge of the queues whose sample is older than 5 s. Counts stop at 100,000 rows of a kind (capped): a sample
-- costs tens of ms at any backlog. Keyed jobs count as ready as far as their lanes are free.
WITH stale AS MATERIALIZED (
  SELECT q FROM unnest(%(queues)s::text[]) q
  WHERE NOT EXISTS (SELECT FROM pgqueue.depth_sample d WHERE d.queue = q AND d.at > clock_timestamp() - interval '5 s')),
due AS MATERIALIZED (
  SELECT s.queue, count(*) AS n, count(*) FILTER (WHERE s.run_at <= now()) AS ripe, min(s.run_at) AS first
  FROM (SELECT j.queue, j.run_at FROM pgqueue.job j WHERE j.run_at IS NOT NULL ORDER BY j.run_at LIMIT 100000) s
  WHERE EXISTS (SELECT FROM stale) GROUP BY s.queue)
INSERT INTO pgqueue.depth_sample AS d (queue, at, ready, delayed, in_flight, blocked, oldest_ready_s, capped)
SELECT v.q, clock_timestamp(),
  CASE WHEN p.paused THEN 0 ELSE x.ready + least(l.free, k.waiting) + coalesce(due.ripe, 0) END,
  coalesce(due.n - due.ripe, 0) + l.backing_off,
  x.in_flight + k.in_flight,
  greatest(k.waiting - least(l.free, k.waiting) - l.backing_off, 0) + CASE WHEN p.paused THEN x.ready + least(l.free, k.waiting) ELSE 0 END,
  CASE WHEN p.paused THEN 0 ELSE greatest(extract(epoch FROM now() - least(x.oldest, due.first, CASE WHEN l.free > 0 THEN k.oldest END)), 0) END,
  x.n = 100000 OR k.n = 100000
FROM stale v(q)
LEFT JOIN due ON due.queue = v.q
CROSS JOIN LATERAL (SELECT coalesce((
  SELECT q.paused OR q.slots <= (
    SELECT count(*) FROM pgqueue.permit m
    WHERE m.queue = v.q AND EXISTS (SELECT FROM pgqueue.job b WHERE b.id = m.job_id AND b.lease <> 0 AND b.deadline > now() OFFSET 0)) -- one by one
  FROM pgqueue.queue q WHERE q.name = v.q), false) AS paused) p -- or at its limit
CROSS JOIN LATERAL (
  SELECT count(*) AS n, count(*) FILTER (WHERE s.deadline <= now()) AS ready, count(*) FILTER (WHERE s.deadline > now()) AS in_flight,
         min(greatest(s.enqueued_at, s.ready_at, s.deadline)) FILTER (WHERE s.deadline <= now()) AS oldest
  FROM (SELECT j.deadline, j.enqueued_at, j.ready_at FROM pgqueue.job j
        WHERE j.queue = v.q AND j.pos IS NOT NULL AND j.key IS NULL ORDER BY j.priority, j.pos LIMIT 100000) s) x
CROSS JOIN LATERAL (
  SELECT count(*) AS n, count(*) FILTER (WHERE s.deadline <= now()) AS waiting, count(*) FILTER (WHERE s.deadline > now()) AS in_flight,
         min(greatest(s.enqueued_at, s.ready_at, s.deadline)) FILTER (WHERE s.deadline <= now()) AS oldest
  FROM (SELECT j.deadline, j.enqueued_at, j.ready_at FROM pgqueue.job j
        WHERE j.queue = v.q AND j.pos > 0 AND j.key IS NOT NULL ORDER BY j.pos LIMIT 100000) s) k
CROSS JOIN LATERAL (
  SELECT count(*) FILTER (WHERE s.deadline <= now()) AS free,
         count(*) FILTER (WHERE s.lease = 0 AND s.deadline > now() AND s.deadline < 'infinity') AS backing_off
  FROM (SELECT n.lease, n.deadline FROM pgqueue.lane n WHERE n.queue = v.q LIMIT 100000) s) l
WHERE pg_catalog.pg_try_advisory_xact_lock(1885827446, pg_catalog.hashtext(v.q))
ON CONFLICT (queue) DO UPDATE SET at = excluded.at, ready = excluded.ready, delayed = excluded.delayed, in_flight = excluded.in_flight,
  blocked = excluded.blocked, oldest_ready_s = excluded.oldest_ready_s, capped = excluded.capped

-- name: gauge
-- The sampled depth of these queues (all queues where NULL).
SELECT g.queue, g.ready, g.delayed, g.in_flight, g.blocked, g.oldest_ready_s, g.capped, g.sampled_s_ago
FROM pgqueue.queue_gauge g WHERE %(queues)s::text[] IS NULL OR g.queue = ANY (%(queues)s::text[]) ORDER BY g.queue

-- name: unknown
-- Waiting jobs whose name no worker of their queue knows, the most first.
SELECT u.queue, u.name, u.jobs, extract(epoch FROM now() - u.oldest)::double precision FROM pgqueue.unknown_names u
ORDER BY u.jobs DESC, u.queue, u.name LIMIT 100

-- name: depth
-- The exact depth of every queue that has jobs.
SELECT d.queue, d.ready, d.delayed, d.in_flight, d.blocked, d.oldest_ready_s, false, 0::double precision
FROM pgqueue.queue_depth d ORDER BY d.queue

-- name: due
-- How many delayed jobs of these queues have their time behind them: a worker makes them ready within half a second.
SELECT count(*) FROM pgqueue.job j WHERE j.run_at <= clock_timestamp() AND j.queue = ANY (%(queues)s::text[])
