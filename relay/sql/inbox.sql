-- name: claim
-- A row comes back for the first who claims the key; the second waits for the first one's transaction.
INSERT INTO pgqueue.inbox (consumer, source, key) VALUES (%(consumer)s::text, %(source)s::text, %(key)s::text)
ON CONFLICT DO NOTHING RETURNING true

-- name: newer
-- A row comes back if the version is higher than every one seen before.
INSERT INTO pgqueue.inbox_version AS v (consumer, source, aggregate_id, version)
VALUES (%(consumer)s::text, %(source)s::text, %(aggregate_id)s::text, %(version)s::bigint)
ON CONFLICT (consumer, source, aggregate_id) DO UPDATE SET version = EXCLUDED.version WHERE v.version < EXCLUDED.version
RETURNING true

-- name: prune
-- Deletes a page of keys applied longer ago than `keep`.
WITH gone AS (
  DELETE FROM pgqueue.inbox i
  WHERE i.ctid = ANY (ARRAY(SELECT o.ctid FROM pgqueue.inbox o WHERE o.applied_at < now() - %(keep)s::interval LIMIT %(page)s::int))
    AND i.applied_at < now() - %(keep)s::interval
  RETURNING 1)
SELECT count(*) FROM gone
