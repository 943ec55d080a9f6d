-- name: jobs
-- Live jobs, the newest first. The state is derived for each row that passes the other conditions, until n have passed.
SELECT j.id, j.name, j.queue, j.priority, j.key, s.state, j.attempt, j.max_attempts, j.lost, j.enqueued_at, j.run_at,
  nullif(j.claimed_at, '-infinity'), nullif(j.deadline, '-infinity'),
  (SELECT w.host || ':' || w.pid FROM pgqueue.worker w WHERE j.lease <> 0 AND w.nonce = j.lease >> 32),
  EXISTS (SELECT FROM pgqueue.job_signal c WHERE c.job_id = j.id)
FROM pgqueue.job j CROSS JOIN LATERAL (SELECT pgqueue.job_state(j.id) AS state) s
WHERE (%(name)s::text IS NULL OR j.name = %(name)s::text) AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
  AND (%(key)s::text IS NULL OR j.key IN (%(key)s::text, '@' || j.name || '@' || %(key)s::text)) AND (%(before)s::bigint IS NULL OR j.id < %(before)s::bigint)
  AND (%(state)s::text IS NULL OR s.state = %(state)s::text)
ORDER BY j.id DESC LIMIT %(n)s::int

-- name: show
-- Everything about one live job, with the log of its unsuccessful attempts.
SELECT j.id, j.name, j.queue, j.priority, j.key, pgqueue.job_state(j.id), j.attempt, coalesce(j.max_attempts, t.max_attempts), j.lost, j.enqueued_at,
  j.run_at, nullif(j.claimed_at, '-infinity'), nullif(j.deadline, '-infinity'),
  (SELECT w.host || ':' || w.pid FROM pgqueue.worker w WHERE j.lease <> 0 AND w.nonce = j.lease >> 32),
  EXISTS (SELECT FROM pgqueue.job_signal c WHERE c.job_id = j.id),
  j.dedup_key, j.idempotency_key, j.timeout_s, CASE WHEN isfinite(j.expires_at) THEN j.expires_at END, j.backoff::text, j.headers::text, j.payload::text,
  coalesce((SELECT json_agg(json_build_object('attempt', a.attempt, 'outcome', a.outcome, 'started_at', a.started_at, 'at', a.at,
    'worker', a.worker, 'error_type', a.error_type, 'error', a.error, 'traceback', a.traceback) ORDER BY a.at)::text
    FROM pgqueue.attempt_log a WHERE a.job_id = j.id), '[]'),
  p.fraction::double precision, p.note
FROM pgqueue.job j LEFT JOIN pgqueue.job_type t ON t.name = j.name LEFT JOIN pgqueue.progress p ON p.job_id = j.id WHERE j.id = %(id)s::bigint

-- name: workers
-- Process starts that have not said good-bye, the youngest last.
SELECT w.host, w.pid, w.version, w.queues, w.names, w.concurrency, w.in_flight, w.draining, w.alive, w.started_at,
  extract(epoch FROM now() - w.beat_at)::double precision, w.overrun
FROM pgqueue.workers w ORDER BY w.started_at, w.host, w.pid
