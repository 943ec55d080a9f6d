-- name: sweep_turn
-- Which of these queues this process is to sweep now.
SELECT q FROM (SELECT DISTINCT q, pgqueue.bucket(q) AS b FROM unnest(%(queues)s::text[]) q) x
WHERE x.b IN (SELECT y.b FROM (SELECT DISTINCT pgqueue.bucket(q) AS b FROM unnest(%(queues)s::text[]) q) y
              WHERE pgqueue.my_turn(y.b, %(period)s::interval))

-- name: turn
SELECT pgqueue.my_turn(%(task)s::text, %(period)s::interval)

-- name: postpone
-- The sweep of these queues was dear: next one not before wait has passed (a minute at most: see my_turn).
SELECT pg_catalog.setval(('pgqueue.turn_' || x.b)::pg_catalog.regclass,
  ((extract(epoch FROM clock_timestamp()) + least(%(wait)s::double precision, 60)) * 1000)::bigint)
FROM (SELECT DISTINCT pgqueue.bucket(q) AS b FROM unnest(%(queues)s::text[]) q) x

-- name: bounds
SELECT pg_catalog.set_config('statement_timeout', %(ms)s::text, true), pg_catalog.set_config('lock_timeout', least(%(ms)s::int, 1000)::text, true)
