-- name: limit
-- Set or lift the limits of a queue.
INSERT INTO pgqueue.queue AS q (name, max_depth, max_age_s)
VALUES (%(queue)s::text, nullif(%(max_depth)s::bigint, 0), nullif(%(max_age_s)s::double precision, 0))
ON CONFLICT (name) DO UPDATE SET
  max_depth = CASE WHEN %(max_depth)s::bigint IS NULL THEN q.max_depth ELSE excluded.max_depth END,
  max_age_s = CASE WHEN %(max_age_s)s::double precision IS NULL THEN q.max_age_s ELSE excluded.max_age_s END
RETURNING q.max_depth, q.max_age_s

-- name: full
SELECT pgqueue.queue_full(%(queue)s::text)
