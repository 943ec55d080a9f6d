-- name: declare
-- Write the policy of job types, so that every producer's rows follow it. Unchanged rows are not touched. Limits that
-- somebody set while jobs run stay.
INSERT INTO pgqueue.job_type AS t (name, queue, priority, max_attempts, backoff, timeout_s, slots, rate_per_s, key_slots, key_rate_per_s, sheddable, keep_s, on_dead)
SELECT d.name, d.queue, d.priority, d.max_attempts, d.backoff, d.timeout_s, d.slots, d.rate_per_s, d.key_slots, d.key_rate_per_s, d.sheddable, d.keep_s, d.on_dead
FROM json_to_recordset(%(types)s::json) AS d(name text, queue text, priority smallint, max_attempts smallint, backoff json, timeout_s real, slots smallint,
  rate_per_s double precision, key_slots smallint, key_rate_per_s double precision, sheddable boolean, keep_s double precision, on_dead text)
ORDER BY d.name
ON CONFLICT (name) DO UPDATE SET
  queue = excluded.queue, priority = excluded.priority, max_attempts = excluded.max_attempts,
  backoff = excluded.backoff, timeout_s = excluded.timeout_s,
  slots = CASE WHEN t.limits_set THEN t.slots ELSE excluded.slots END, rate_per_s = CASE WHEN t.limits_set THEN t.rate_per_s ELSE excluded.rate_per_s END,
  key_slots = CASE WHEN t.limits_set THEN t.key_slots ELSE excluded.key_slots END,
  key_rate_per_s = CASE WHEN t.limits_set THEN t.key_rate_per_s ELSE excluded.key_rate_per_s END,
  sheddable = excluded.sheddable, keep_s = excluded.keep_s, on_dead = excluded.on_dead, declared_at = now()
WHERE (t.queue, t.priority, t.max_attempts, t.backoff::text, t.timeout_s, t.sheddable, t.keep_s, t.on_dead)
  IS DISTINCT FROM (excluded.queue, excluded.priority, excluded.max_attempts, excluded.backoff::text, excluded.timeout_s, excluded.sheddable, excluded.keep_s, excluded.on_dead)
  OR (NOT t.limits_set AND (t.slots, t.rate_per_s, t.key_slots, t.key_rate_per_s)
      IS DISTINCT FROM (excluded.slots, excluded.rate_per_s, excluded.key_slots, excluded.key_rate_per_s))
