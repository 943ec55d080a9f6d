-- name: take_over
-- Marks the events first: of two relays with the same event one waits here and then finds nothing to enqueue.
UPDATE pgqueue.outbox SET published_at = clock_timestamp() WHERE id = ANY (%(ids)s::bigint[]) AND published_at IS NULL RETURNING id

-- name: enqueue
-- One job per event and subscriber, in event order; the aggregate is the ordering key. A full queue takes it: the event
-- was accepted when it was written, and to refuse it here would hold up all the others.
SELECT count(m.id)
FROM ROWS FROM (unnest(%(names)s::text[]), unnest(%(keys)s::text[]), unnest(%(headers)s::text[]), unnest(%(payloads)s::text[]))
     WITH ORDINALITY e(name, key, headers, payload, place)
CROSS JOIN LATERAL pgqueue.enqueue_many(
  name => e.name, payloads => ('[' || e.payload || ']')::json, keys => ARRAY[e.key], headers => e.headers::json, when_full => 'ignore') m

-- name: drop_taken
-- Retention 0: what was handed over is gone.
DELETE FROM pgqueue.outbox WHERE id = ANY (%(ids)s::bigint[])
