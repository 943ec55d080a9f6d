-- name: fold
-- Appended counters become minute counters. Up to 1,000 rows in the answer tell that there may be more.
WITH page AS MATERIALIZED (SELECT t.ctid FROM pgqueue.tally t LIMIT 20000 FOR UPDATE SKIP LOCKED),
d AS (DELETE FROM pgqueue.tally t USING page WHERE t.ctid = page.ctid RETURNING t.at, t.queue, t.name, t.outcome, t.n, t.wait_s),
f AS (
  INSERT INTO pgqueue.tally_minute AS m (minute, queue, name, outcome, n, wait_s)
  SELECT date_trunc('minute', d.at), d.queue, d.name, d.outcome, sum(d.n), sum(d.wait_s) FROM d GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
  ON CONFLICT (minute, queue, name, outcome) DO UPDATE SET n = m.n + excluded.n, wait_s = m.wait_s + excluded.wait_s)
SELECT 1 FROM d LIMIT 1000

-- name: dedup
-- Dedup keys that are free again: windows that have passed by their index, apart from keys whose job is gone. A key that
-- has a new job meanwhile is known by its id: the job itself is not in this statement's snapshot.
WITH past AS MATERIALIZED (
  SELECT f.queue, f.key FROM pgqueue.dedup f WHERE f.until < now() ORDER BY f.until LIMIT 1000 FOR UPDATE SKIP LOCKED),
free AS MATERIALIZED (
  SELECT f.queue, f.key, f.job_id FROM pgqueue.dedup f
  WHERE f.until IS NULL AND NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.id = f.job_id) LIMIT 1000),
gone AS MATERIALIZED (
  SELECT x.queue, x.key FROM free CROSS JOIN LATERAL (
    SELECT f.queue, f.key FROM pgqueue.dedup f
    WHERE f.queue = free.queue AND f.key = free.key AND f.job_id = free.job_id AND f.until IS NULL FOR UPDATE SKIP LOCKED) x)
DELETE FROM pgqueue.dedup d WHERE (d.queue, d.key) IN (SELECT p.queue, p.key FROM past p UNION ALL SELECT g.queue, g.key FROM gone g)

-- name: effects
-- Ledger rows past their retention.
DELETE FROM pgqueue.effect e WHERE e.ctid = ANY (ARRAY(
  SELECT g.ctid FROM pgqueue.effect g WHERE g.applied_at < now() - %(keep)s::interval ORDER BY g.applied_at LIMIT 1000))

-- name: signals
-- Cancel requests whose job has ended.
DELETE FROM pgqueue.job_signal s WHERE s.sent_at < now() - interval '1 min' AND NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.id = s.job_id)

-- name: attempts
-- Attempts of jobs that succeeded in the end.
DELETE FROM pgqueue.attempt_log a WHERE a.ctid = ANY (ARRAY(
  SELECT g.ctid FROM pgqueue.attempt_log g
  WHERE NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.id = g.job_id) LIMIT 2000))

-- name: letters
-- Dead letters past their retention, where one is set, the oldest first. One that blocks its ordering key is left to a person.
SELECT pgqueue.discard(ARRAY(
  SELECT d.id FROM pgqueue.dead_job d WHERE d.died_at < now() - %(keep)s::interval AND NOT d.blocks ORDER BY d.died_at, d.id LIMIT 1000))

-- name: minutes
-- Minute counters of long ago, the oldest first.
DELETE FROM pgqueue.tally_minute m WHERE m.ctid = ANY (ARRAY(
  SELECT g.ctid FROM pgqueue.tally_minute g WHERE g.minute < now() - %(keep)s::interval ORDER BY g.minute LIMIT 1000))

-- name: workers
-- Process starts that ended without saying so.
DELETE FROM pgqueue.worker w WHERE w.beat_at < now() - interval '1 day'
