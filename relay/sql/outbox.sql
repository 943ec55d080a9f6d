-- name: add
-- One event in the caller's transaction.
INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, aggregate_type, aggregate_version, headers)
VALUES (%(aggregate_id)s::text, %(event_type)s::text, %(payload)s::jsonb, %(aggregate_type)s::text, %(version)s::bigint, %(headers)s::jsonb)
RETURNING id

-- name: add_many
-- Many events in the caller's transaction; ids rise in the order of the arrays.
INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, aggregate_type, aggregate_version, headers)
SELECT e.aggregate_id, e.event_type, e.payload::jsonb, e.aggregate_type, e.version, e.headers::jsonb
FROM ROWS FROM (unnest(%(aggregate_ids)s::text[]), unnest(%(event_types)s::text[]), unnest(%(payloads)s::text[]),
                unnest(%(aggregate_types)s::text[]), unnest(%(versions)s::bigint[]), unnest(%(headers)s::text[]))
     WITH ORDINALITY e(aggregate_id, event_type, payload, aggregate_type, version, headers, place)
ORDER BY e.place
RETURNING id
