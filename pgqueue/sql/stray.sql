-- name: strays
-- Of each queue, from a position on: how many keyed jobs a window holds, where it ends, and whether one of them has no lane.
-- Reads only: a lane that is there is not touched.
SELECT v.o::int, x.n::int, x.last, x.missing
FROM unnest(%(queues)s::text[], %(floors)s::bigint[]) WITH ORDINALITY v(q, f, o)
CROSS JOIN LATERAL (
  SELECT count(*) AS n, max(s.pos) AS last,
    coalesce(bool_or(NOT EXISTS (SELECT FROM pgqueue.lane l WHERE l.queue = v.q AND l.key = s.key AND l.slot = 0)), false) AS missing
  FROM (SELECT j.pos, j.key FROM pgqueue.job j
        WHERE j.queue = v.q AND j.pos > v.f AND j.pos > 0 AND j.key IS NOT NULL ORDER BY j.pos LIMIT 5000) s) x
ORDER BY v.o
