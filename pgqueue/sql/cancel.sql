-- name: cancel
-- Jobs that nobody holds go at once; of a leased one its worker is asked.
SELECT c.id, c.state FROM pgqueue.cancel(%(ids)s::bigint[]) c

-- name: waiting
-- The next n jobs of a name (or queue) that nobody holds.
SELECT j.id FROM pgqueue.job j
WHERE j.lease = 0 AND j.id > %(after)s::bigint
  AND (%(name)s::text IS NULL OR j.name = %(name)s::text) AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
ORDER BY j.id LIMIT %(n)s::int

-- name: count
SELECT count(*) FROM pgqueue.job j
WHERE j.lease = 0 AND (%(name)s::text IS NULL OR j.name = %(name)s::text) AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
