-- Every block takes the same filter: the arguments of pgqueue.dead_letters, and ids (NULL: any). since_ago and
-- until_ago are lengths of time before now.

-- name: groups
-- By error type, the one seen last first. Counted per queue and name before anything is sorted, so that a hundred
-- thousand letters are read once and never spilled. The sample is the youngest job of a group.
WITH few AS MATERIALIZED (
  SELECT d.error_type, d.reason, d.queue, d.name, count(*) AS n, min(d.died_at) AS first, max(d.died_at) AS last, max(d.id) AS sample
  FROM pgqueue.dead_letters(%(error_type)s::text, %(reason)s::text, %(name)s::text, %(queue)s::text,
    coalesce(%(since)s::timestamptz, now() - %(since_ago)s::interval), coalesce(%(until)s::timestamptz, now() - %(until_ago)s::interval),
    %(matching)s::json) d
  WHERE %(ids)s::bigint[] IS NULL OR d.id = ANY (%(ids)s::bigint[])
  GROUP BY d.error_type, d.reason, d.queue, d.name),
g AS (
  SELECT few.error_type, sum(few.n)::bigint AS n, min(few.first) AS first, max(few.last) AS last, max(few.sample) AS sample,
    array_agg(DISTINCT few.reason ORDER BY few.reason) AS reasons, array_agg(DISTINCT few.queue ORDER BY few.queue) AS queues,
    array_agg(DISTINCT few.name ORDER BY few.name) AS names
  FROM few GROUP BY few.error_type ORDER BY max(few.last) DESC LIMIT %(n)s::int)
SELECT g.error_type, g.n, g.first, g.last, g.reasons, g.queues, g.names, g.sample, d.error
FROM g LEFT JOIN pgqueue.dead_job d ON d.id = g.sample ORDER BY g.last DESC

-- name: letters
-- One row a letter, the newest first.
SELECT d.id, d.name, d.queue, d.key, d.attempt, d.reason, d.error_type, d.error, d.died_at, d.worker, d.trace_id
FROM pgqueue.dead_letters(%(error_type)s::text, %(reason)s::text, %(name)s::text, %(queue)s::text,
  coalesce(%(since)s::timestamptz, now() - %(since_ago)s::interval), coalesce(%(until)s::timestamptz, now() - %(until_ago)s::interval),
  %(matching)s::json) d
WHERE %(ids)s::bigint[] IS NULL OR d.id = ANY (%(ids)s::bigint[])
ORDER BY d.died_at DESC, d.id DESC LIMIT %(n)s::int

-- name: tell
-- How many there are, and until when: a replay that goes on must not meet its own jobs again.
SELECT count(*), coalesce(%(until)s::timestamptz, now() - %(until_ago)s::interval, now())
FROM pgqueue.dead_letters(%(error_type)s::text, %(reason)s::text, %(name)s::text, %(queue)s::text,
  coalesce(%(since)s::timestamptz, now() - %(since_ago)s::interval), coalesce(%(until)s::timestamptz, now() - %(until_ago)s::interval),
  %(matching)s::json) d
WHERE %(ids)s::bigint[] IS NULL OR d.id = ANY (%(ids)s::bigint[])

-- name: show
-- Everything about one letter.
SELECT d.id, d.name, d.queue, d.priority, d.key, d.dedup_key, d.idempotency_key, d.attempt, d.max_attempts, d.lost, d.reason,
  d.error_type, d.error, d.traceback, d.worker, d.trace_id, d.enqueued_at, d.first_attempt_at, d.last_attempt_at, d.died_at,
  CASE WHEN isfinite(d.expires_at) THEN d.expires_at END, d.headers::text, d.payload::text, d.attempts::text, d.blocks
FROM pgqueue.dead_job d WHERE d.id = %(id)s::bigint

-- name: replay
-- Put back the next n letters above after, the lowest id first: jobs of one key return in order. Letters that somebody
-- else moves at this moment are left to him; the last row seen is told in any case.
WITH page AS MATERIALIZED (
  SELECT d.id
  FROM pgqueue.dead_letters(%(error_type)s::text, %(reason)s::text, %(name)s::text, %(queue)s::text,
    coalesce(%(since)s::timestamptz, now() - %(since_ago)s::interval), coalesce(%(until)s::timestamptz, now() - %(until_ago)s::interval),
    %(matching)s::json) d
  WHERE (%(ids)s::bigint[] IS NULL OR d.id = ANY (%(ids)s::bigint[])) AND d.id > %(after)s::bigint
  ORDER BY d.id LIMIT %(n)s::int)
SELECT (SELECT max(page.id) FROM page), ARRAY(SELECT r.id FROM pgqueue.replay(ARRAY(SELECT page.id FROM page), %(payload)s::json) r(id))

-- name: discard
-- As replay, but for good.
WITH page AS MATERIALIZED (
  SELECT d.id
  FROM pgqueue.dead_letters(%(error_type)s::text, %(reason)s::text, %(name)s::text, %(queue)s::text,
    coalesce(%(since)s::timestamptz, now() - %(since_ago)s::interval), coalesce(%(until)s::timestamptz, now() - %(until_ago)s::interval),
    %(matching)s::json) d
  WHERE (%(ids)s::bigint[] IS NULL OR d.id = ANY (%(ids)s::bigint[])) AND d.id > %(after)s::bigint
  ORDER BY d.id LIMIT %(n)s::int)
SELECT (SELECT max(page.id) FROM page), ARRAY(SELECT r.id FROM pgqueue.discard(ARRAY(SELECT page.id FROM page)) r(id))

-- name: rate
-- New letters of the last ten minutes.
SELECT r.queue, r.error_type, r.jobs FROM pgqueue.dead_rate r ORDER BY r.jobs DESC
