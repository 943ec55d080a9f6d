-- name: add
-- One event in the caller's transaction.
INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, aggregate_type, aggregate_version, headers)
VALUES (%(aggregate_id)s::text, %(event_type)s::text, %(payload)s::jsonb, %(aggregate_type)s::text, %(version)s::bigint, %(headers)s::jsonb)
RETURNING id

-- name: add_ordered
-- The same after the lock of the aggregate: its ids rise in the order of the commits.
SELECT pgqueue.outbox_add_ordered(%(aggregate_id)s::text, %(event_type)s::text, %(payload)s::jsonb, %(aggregate_type)s::text, %(version)s::bigint, %(headers)s::jsonb)

-- name: add_many
-- Many events in the caller's transaction; ids rise in the order of the arrays.
INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, aggregate_type, aggregate_version, headers)
SELECT e.aggregate_id, e.event_type, e.payload::jsonb, e.aggregate_type, e.version, e.headers::jsonb
FROM ROWS FROM (unnest(%(aggregate_ids)s::text[]), unnest(%(event_types)s::text[]), unnest(%(payloads)s::text[]),
                unnest(%(aggregate_types)s::text[]), unnest(%(versions)s::bigint[]), unnest(%(headers)s::text[]))
     WITH ORDINALITY e(aggregate_id, event_type, payload, aggregate_type, version, headers, place)
ORDER BY e.place
RETURNING id

-- name: add_many_ordered
-- The same after the locks of all their aggregates, taken in one order so that two such statements do not deadlock.
-- The count is there before the first row is made, so every lock comes before every number.
WITH locked AS MATERIALIZED (
  SELECT count(pg_catalog.pg_advisory_xact_lock(k.lock)) AS n
  FROM (SELECT DISTINCT hashtextextended(a.id, 0) AS lock FROM unnest(%(aggregate_ids)s::text[]) a(id) ORDER BY 1) k)
INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, aggregate_type, aggregate_version, headers)
SELECT e.aggregate_id, e.event_type, e.payload::jsonb, e.aggregate_type, e.version, e.headers::jsonb
FROM ROWS FROM (unnest(%(aggregate_ids)s::text[]), unnest(%(event_types)s::text[]), unnest(%(payloads)s::text[]),
                unnest(%(aggregate_types)s::text[]), unnest(%(versions)s::bigint[]), unnest(%(headers)s::text[]))
     WITH ORDINALITY e(aggregate_id, event_type, payload, aggregate_type, version, headers, place)
CROSS JOIN locked
ORDER BY e.place
RETURNING id
