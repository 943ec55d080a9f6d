-- name: enqueue
-- One job per element of payloads, in the caller's transaction. The SQL function fills in what the caller left out. Its
-- answer is read as one row: a row for each job costs more than to write the array and to read it. What became of each job
-- is told where they may differ, with dedup keys. Of a full queue it tells by a negative id, and its name stands beside it.
SELECT array_agg(m.id), array_agg(m.created) FILTER (WHERE %(each)s::boolean), array_agg(m.changed) FILTER (WHERE %(each)s::boolean),
  CASE WHEN (array_agg(m.id))[1] < 0 THEN coalesce(%(queue)s::text, (SELECT t.queue FROM pgqueue.job_type t WHERE t.name = %(name)s::text), 'default') END
FROM pgqueue.enqueue_many(
  name => %(name)s::text, payloads => %(payloads)s::json, queue => %(queue)s::text, priority => %(priority)s::int,
  run_at => %(run_at)s::timestamptz, delay => %(delay)s::interval, keys => %(keys)s::text[],
  dedup_keys => %(dedup_keys)s::text[], dedup_window => %(dedup_window)s::interval, dedup_live => %(dedup_live)s::boolean,
  dedup_mode => %(dedup_mode)s::text, dedup_max_wait => %(dedup_max_wait)s::interval,
  idempotency_keys => %(idempotency_keys)s::text[], max_attempts => %(max_attempts)s::int, timeout_s => %(timeout_s)s::real,
  backoff => %(backoff)s::json, expires_at => %(expires_at)s::timestamptz, headers => %(headers)s::json, when_full => 'tell',
  else_queue => %(else_queue)s::text, else_priority => %(else_priority)s::int) m

-- name: declared
-- Whether some worker, or pgqueue sync, has declared this job type.
SELECT EXISTS (SELECT FROM pgqueue.job_type t WHERE t.name = %(name)s)
