-- name: take_over
-- Marks the events first: of two relays with the same event one waits here and then finds nothing to enqueue.
UPDATE pgqueue.outbox SET published_at = clock_timestamp() WHERE id = ANY (%(ids)s::bigint[]) AND published_at IS NULL RETURNING id

-- name: enqueue
-- The jobs of one name, in event order; the aggregate is the ordering key, but a type with a limit takes none. A full queue
-- takes them: the events were accepted when they were written, and to refuse them here would hold up all the others.
SELECT count(m.id)
FROM pgqueue.enqueue_many(
  name => %(name)s::text, payloads => %(payloads)s::json,
  keys => CASE WHEN NOT EXISTS (SELECT FROM pgqueue.job_type t WHERE t.name = %(name)s::text AND t.slots IS NOT NULL) THEN %(keys)s::text[] END,
  headers_each => %(headers)s::json[], when_full => 'ignore') m

-- name: drop_taken
-- Retention 0: what was handed over is gone.
DELETE FROM pgqueue.outbox WHERE id = ANY (%(ids)s::bigint[])
