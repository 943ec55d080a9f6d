-- name: mine
-- The partitions this relay owns.
SELECT part FROM pgqueue.relay_partition WHERE owner = %(me)s::uuid

-- name: trouble
-- Rejected or held events that wait, or are due again; their waiting makes the whole aggregate wait.
SELECT o.part, coalesce(o.aggregate_id, o.id::text), o.id, coalesce(o.next_attempt_at > now(), false)
FROM pgqueue.outbox o
WHERE o.part = ANY (%(parts)s::smallint[]) AND o.published_at IS NULL AND o.last_error IS NOT NULL
  AND (o.parked_at IS NULL OR o.next_attempt_at IS NOT NULL)

-- name: read
-- The oldest unpublished events above each partition's floor, without the aggregates that wait.
-- Times that Python cannot hold are bent: one odd row must not stop the others.
-- The row comparison leaves the planner only outbox_pending: with "part = .." it takes the primary key (986 ms against 23).
SELECT o.id, o.part, o.key, o.aggregate_id, o.aggregate_version, o.event_type, o.payload, o.aggregate_type, o.headers, o.created_at, o.attempts
FROM unnest(%(parts)s::smallint[], %(floors)s::bigint[]) AS p(part, floor)
CROSS JOIN LATERAL (
  SELECT o.id, o.part, coalesce(o.aggregate_id, o.id::text) AS key, o.aggregate_id, o.aggregate_version, o.event_type,
         o.payload::text AS payload, o.aggregate_type, o.headers::text AS headers, o.attempts,
         least(greatest(o.created_at, '0001-01-03'), '9999-12-29') AS created_at
  FROM pgqueue.outbox o
  WHERE (o.part, o.id) > (p.part, p.floor) AND o.part <= p.part AND o.published_at IS NULL AND o.parked_at IS NULL
    AND coalesce(o.aggregate_id, o.id::text) NOT IN (
      SELECT coalesce(b.aggregate_id, b.id::text) FROM pgqueue.outbox b
      WHERE b.part = ANY (%(parts)s::smallint[]) AND b.published_at IS NULL AND b.last_error IS NOT NULL
        AND (b.parked_at IS NULL OR b.next_attempt_at IS NOT NULL) AND b.next_attempt_at > now())
  ORDER BY o.part, o.id LIMIT %(n)s::int) o

-- name: chosen
-- Those of these events that are neither published nor parked; said so that a plan made while the outbox was empty does
-- not read all that is pending.
SELECT o.id, o.part, coalesce(o.aggregate_id, o.id::text), o.aggregate_id, o.aggregate_version, o.event_type, o.payload::text, o.aggregate_type,
       o.headers::text, least(greatest(o.created_at, '0001-01-03'), '9999-12-29'), o.attempts
FROM pgqueue.outbox o WHERE o.id = ANY (%(ids)s::bigint[]) AND coalesce(o.published_at, o.parked_at) IS NULL

-- name: last
-- The highest id handed out so far; read after the rows and before the writers. The clock dates the look.
SELECT last_value - (NOT is_called)::int, clock_timestamp() FROM pgqueue.outbox_id_seq

-- name: writers
-- The transactions that may still commit an id handed out so far: nextval locks the sequence to their end.
SELECT l.virtualtransaction FROM pg_catalog.pg_locks l
WHERE l.locktype = 'relation' AND l.relation = 'pgqueue.outbox_id_seq'::pg_catalog.regclass AND l.mode = 'RowExclusiveLock'
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())

-- name: mark
-- Confirmed events are published, whoever says so: a fact needs no fence.
UPDATE pgqueue.outbox SET published_at = clock_timestamp() WHERE id = ANY (%(ids)s::bigint[]) AND published_at IS NULL

-- name: mark_by_delete
-- Retention 0: a published event is gone.
DELETE FROM pgqueue.outbox WHERE id = ANY (%(ids)s::bigint[])

-- name: mark_unlocked
-- Marks what no other transaction holds; what is still unpublished afterwards is marked next time.
WITH free AS MATERIALIZED (
  SELECT o.id FROM pgqueue.outbox o WHERE o.id = ANY (%(ids)s::bigint[]) AND o.published_at IS NULL
  ORDER BY o.id FOR NO KEY UPDATE SKIP LOCKED)
UPDATE pgqueue.outbox o SET published_at = clock_timestamp() FROM free WHERE o.id = free.id

-- name: unmarked
-- Which of these events are not published yet.
SELECT o.id FROM pgqueue.outbox o WHERE o.id = ANY (%(ids)s::bigint[]) AND o.published_at IS NULL

-- name: fail
-- Rejected events: wait and try again, or after max_attempts be parked, alone or (block) with the aggregate behind them.
WITH rejected AS MATERIALIZED (
  SELECT o.id, e.error FROM unnest(%(ids)s::bigint[], %(errors)s::text[]) AS e(id, error)
  CROSS JOIN LATERAL (
    SELECT o.id FROM pgqueue.outbox o WHERE o.id = e.id AND coalesce(o.published_at, o.parked_at) IS NULL
    FOR NO KEY UPDATE SKIP LOCKED) o
  ORDER BY o.id)
UPDATE pgqueue.outbox o SET
  attempts = o.attempts + 1,
  last_error = rejected.error,
  parked_at = CASE WHEN o.attempts + 1 >= %(max_attempts)s::int THEN clock_timestamp() END,
  next_attempt_at = CASE
    WHEN o.attempts + 1 < %(max_attempts)s::int
      THEN clock_timestamp() + least(%(cap)s::double precision, %(base)s::double precision * 2 ^ least(o.attempts, 30)) * interval '1 s'
    WHEN %(block)s::boolean THEN 'infinity'::timestamptz END
FROM rejected WHERE o.id = rejected.id
RETURNING o.id, o.attempts, o.parked_at IS NOT NULL

-- name: defer
-- Events without an answer while others got theirs: their aggregates wait; no attempt is spent, so they are never parked.
WITH late AS MATERIALIZED (
  SELECT o.id, e.error, e.delay FROM unnest(%(ids)s::bigint[], %(errors)s::text[], %(delays)s::double precision[]) AS e(id, error, delay)
  CROSS JOIN LATERAL (
    SELECT o.id FROM pgqueue.outbox o WHERE o.id = e.id AND coalesce(o.published_at, o.parked_at) IS NULL
    FOR NO KEY UPDATE SKIP LOCKED) o
  ORDER BY o.id)
UPDATE pgqueue.outbox o SET last_error = late.error, next_attempt_at = clock_timestamp() + late.delay * interval '1 s'
FROM late WHERE o.id = late.id

-- name: idle
-- Asks writers for a notification during the next `seconds`.
SELECT setval('pgqueue.outbox_idle', (extract(epoch FROM clock_timestamp() + %(seconds)s::double precision * interval '1 s') * 1000)::bigint)
