-- name: parked
-- Events set aside and heads that wait, oldest first.
SELECT o.id, o.event_type, o.aggregate_id, o.created_at, o.attempts, o.last_error, o.parked_at, o.next_attempt_at IS NOT NULL
FROM pgqueue.outbox o
WHERE o.published_at IS NULL AND o.last_error IS NOT NULL AND (o.parked_at IS NOT NULL OR o.next_attempt_at > now()) AND o.id > %(after)s::bigint
ORDER BY o.id LIMIT %(limit)s::int

-- name: retry
-- Makes events due again, in their old place; the reason stays, which is how relays learn to look below their floor.
WITH chosen AS MATERIALIZED (
  SELECT o.id FROM pgqueue.outbox o WHERE o.id = ANY (%(ids)s::bigint[]) AND o.published_at IS NULL AND o.last_error IS NOT NULL
  ORDER BY o.id FOR NO KEY UPDATE)
UPDATE pgqueue.outbox o SET parked_at = NULL, next_attempt_at = NULL, attempts = 0 FROM chosen WHERE o.id = chosen.id RETURNING o.id

-- name: skip
-- Sets events aside for good; the ones behind them go on.
WITH chosen AS MATERIALIZED (
  SELECT o.id FROM pgqueue.outbox o WHERE o.id = ANY (%(ids)s::bigint[]) AND o.published_at IS NULL
  ORDER BY o.id FOR NO KEY UPDATE)
UPDATE pgqueue.outbox o SET parked_at = coalesce(o.parked_at, clock_timestamp()), next_attempt_at = NULL, last_error = coalesce(o.last_error, 'skipped')
FROM chosen WHERE o.id = chosen.id RETURNING o.id

-- name: hold
-- Stops an aggregate at its oldest event, as if that had been rejected.
UPDATE pgqueue.outbox SET next_attempt_at = 'infinity', last_error = %(why)s::text
WHERE id = (
  SELECT min(o.id) FROM pgqueue.outbox o
  WHERE o.part = (hashtextextended(%(aggregate_id)s::text, 0) & 2147483647) %% (SELECT count(*) FROM pgqueue.relay_partition)
    AND o.aggregate_id = %(aggregate_id)s::text AND o.published_at IS NULL AND o.parked_at IS NULL)
RETURNING id
