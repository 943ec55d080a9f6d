-- name: found
-- What a replay would copy: published events that are no copies themselves. Reads the whole outbox.
SELECT count(*), count(DISTINCT o.event_type), count(DISTINCT o.aggregate_id), min(o.created_at), max(o.created_at)
FROM pgqueue.outbox o
WHERE o.published_at IS NOT NULL AND o.headers->>'replay_of' IS NULL
  AND (%(event_type)s::text IS NULL OR o.event_type = %(event_type)s::text
       OR (right(%(event_type)s::text, 1) = '*' AND starts_with(o.event_type, left(%(event_type)s::text, -1))))
  AND (%(aggregate_id)s::text IS NULL OR o.aggregate_id = %(aggregate_id)s::text)
  AND (%(since)s::timestamptz IS NULL OR o.created_at >= %(since)s::timestamptz)
  AND (%(until)s::timestamptz IS NULL OR o.created_at < %(until)s::timestamptz)

-- name: now
-- The time of the database, from which "two hours ago" is counted.
SELECT clock_timestamp()

-- name: begin
-- Notes a replay; no row if one with the same type and aggregate has not ended.
INSERT INTO pgqueue.outbox_replay (event_type, aggregate_id, since, until, upto)
SELECT %(event_type)s::text, %(aggregate_id)s::text, %(since)s::timestamptz, %(until)s::timestamptz, coalesce(max(o.id), 0) FROM pgqueue.outbox o
ON CONFLICT DO NOTHING
RETURNING id, event_type, aggregate_id, since, until, copied, started_at, ended_at

-- name: open
-- The replay with this type and aggregate that has not ended.
SELECT r.id, r.event_type, r.aggregate_id, r.since, r.until, r.copied, r.started_at, r.ended_at
FROM pgqueue.outbox_replay r
WHERE r.ended_at IS NULL AND coalesce(r.event_type, '') = coalesce(%(event_type)s::text, '') AND coalesce(r.aggregate_id, '') = coalesce(%(aggregate_id)s::text, '')

-- name: show
-- One replay.
SELECT r.id, r.event_type, r.aggregate_id, r.since, r.until, r.copied, r.started_at, r.ended_at FROM pgqueue.outbox_replay r WHERE r.id = %(id)s::bigint

-- name: leave
-- Gives up the replay with this type and aggregate that has not ended; what it copied stays.
UPDATE pgqueue.outbox_replay r SET ended_at = clock_timestamp()
WHERE r.ended_at IS NULL AND coalesce(r.event_type, '') = coalesce(%(event_type)s::text, '') AND coalesce(r.aggregate_id, '') = coalesce(%(aggregate_id)s::text, '')
RETURNING r.id

-- name: copy
-- Copies the next events of a replay and notes how far it is: one statement, so a kill leaves either both or none, and of two
-- at once one waits and goes on where the other ended. New ids rise in the order of the old ones. A copy counts from now in the
-- lag; the time of the event travels in a header.
WITH run AS MATERIALIZED (SELECT r.* FROM pgqueue.outbox_replay r WHERE r.id = %(id)s::bigint AND r.ended_at IS NULL FOR NO KEY UPDATE),
examined AS MATERIALIZED (
  SELECT o.id, o.published_at IS NOT NULL AND o.headers->>'replay_of' IS NULL
      AND (run.event_type IS NULL OR o.event_type = run.event_type
           OR (right(run.event_type, 1) = '*' AND starts_with(o.event_type, left(run.event_type, -1))))
      AND (run.aggregate_id IS NULL OR o.aggregate_id = run.aggregate_id)
      AND (run.since IS NULL OR o.created_at >= run.since) AND (run.until IS NULL OR o.created_at < run.until) AS wanted
  FROM run CROSS JOIN LATERAL (
    SELECT p.id, p.published_at, p.headers, p.event_type, p.aggregate_id, p.created_at FROM pgqueue.outbox p
    WHERE p.id > run.done_to AND p.id <= run.upto ORDER BY p.id LIMIT %(window)s::int) o),
page AS MATERIALIZED (SELECT e.id FROM examined e WHERE e.wanted ORDER BY e.id LIMIT %(n)s::int),
copies AS (
  INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, aggregate_type, aggregate_version, headers)
  SELECT o.aggregate_id, o.event_type, o.payload, o.aggregate_type, o.aggregate_version,
         o.headers || jsonb_build_object('replay_of', 'outbox:' || o.id, 'replay_time',
           to_char(least(greatest(o.created_at, '0001-01-03'), '9999-12-29') AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
  FROM page JOIN pgqueue.outbox o ON o.id = page.id
  ORDER BY o.id
  RETURNING id)
UPDATE pgqueue.outbox_replay r SET
  copied = r.copied + (SELECT count(*) FROM copies),
  done_to = CASE WHEN (SELECT count(*) FROM page) >= %(n)s::int THEN (SELECT max(page.id) FROM page)
                 ELSE coalesce((SELECT max(e.id) FROM examined e), run.upto) END,
  ended_at = CASE WHEN (SELECT count(*) FROM page) < %(n)s::int AND (SELECT count(*) FROM examined) < %(window)s::int THEN clock_timestamp() END
FROM run WHERE r.id = run.id
RETURNING (SELECT count(*) FROM copies), r.copied, r.ended_at IS NOT NULL
