-- name: turn
-- Whether it is this transaction's turn to prune; free again at its end.
SELECT pg_catalog.pg_try_advisory_xact_lock(1885824877, 2)

-- name: page
-- Deletes the published events of one page that are older than `keep`; parked ones stay, whatever their age. Says
-- whether one that stays was written within `keep`: then nothing behind the page is old enough.
WITH page AS MATERIALIZED (
  SELECT o.id, o.created_at, o.published_at FROM pgqueue.outbox o WHERE o.id > %(cursor)s::bigint ORDER BY o.id LIMIT %(size)s::int),
gone AS (
  DELETE FROM pgqueue.outbox o USING page p
  WHERE o.id = p.id AND o.published_at IS NOT NULL AND p.published_at < now() - %(keep)s::interval
  RETURNING o.id)
SELECT (SELECT max(id) FROM page), (SELECT count(*) FROM page), (SELECT count(*) FROM gone),
       EXISTS (SELECT FROM page p WHERE p.created_at BETWEEN now() - %(keep)s::interval AND now()
               AND (p.published_at < now() - %(keep)s::interval) IS NOT TRUE)
