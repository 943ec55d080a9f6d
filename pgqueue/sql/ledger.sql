-- name: hold
-- Right before take: lock these (name, key) in one order to the end of the transaction. Those that nobody has used are taken.
INSERT INTO pgqueue.effect AS e (name, key, job_id, lease)
SELECT DISTINCT ON (t.n, t.k) t.n, t.k, t.j, t.l
FROM (SELECT n COLLATE "C" AS n, k COLLATE "C" AS k, j, l
      FROM unnest(%(names)s::text[], %(keys)s::text[], %(ids)s::bigint[], %(leases)s::bigint[]) AS u(n, k, j, l)) t
ORDER BY t.n, t.k, t.j
ON CONFLICT (name, key) DO UPDATE SET lease = e.lease WHERE false

-- name: take
-- Right before dispatch: these jobs have their (name, key) now. Held by another job only while that one's lease lives. Keys
-- are looked up one by one, and found again by their ctid, as hold has locked them: a join may read the whole ledger.
WITH t AS MATERIALIZED (
  SELECT DISTINCT ON (u.n, u.k) u.* FROM unnest(%(names)s::text[], %(keys)s::text[], %(ids)s::bigint[], %(leases)s::bigint[]) AS u(n, k, j, l)
  ORDER BY u.n, u.k, u.j),
u AS (
  UPDATE pgqueue.effect e SET job_id = o.j, lease = o.l
  FROM (SELECT t.j, t.l, e.at FROM t CROSS JOIN LATERAL (
          SELECT e.ctid AS at FROM pgqueue.effect e
          WHERE e.name = t.n AND e.key = t.k AND e.applied_at IS NULL AND (e.job_id, e.lease) <> (t.j, t.l) AND NOT EXISTS (
            SELECT FROM pgqueue.job j WHERE j.id = e.job_id AND j.id <> t.j AND j.lease = e.lease AND j.deadline > clock_timestamp()) OFFSET 0) e) o
  WHERE e.ctid = o.at RETURNING e.job_id)
SELECT u.job_id FROM u
UNION ALL
SELECT t.j FROM t CROSS JOIN LATERAL (
  SELECT FROM pgqueue.effect e WHERE e.name = t.n AND e.key = t.k AND e.job_id = t.j AND e.lease = t.l AND e.applied_at IS NULL OFFSET 0) e

-- name: applied
-- Which of these (name, key) have been applied, and by which job.
SELECT t.j, e.job_id FROM unnest(%(names)s::text[], %(keys)s::text[], %(ids)s::bigint[]) AS t(n, k, j)
JOIN pgqueue.effect e ON e.name = t.n AND e.key = t.k WHERE e.applied_at IS NOT NULL

-- name: apply
-- Success: the ledger says so and the job goes, in one statement, or neither. Passes rows somebody else has locked.
WITH l AS MATERIALIZED (
  SELECT x.id FROM unnest(%(ids)s::bigint[], %(leases)s::bigint[]) x(id, lease)
  CROSS JOIN LATERAL (SELECT j.id FROM pgqueue.job j WHERE j.id = x.id AND j.lease = x.lease FOR UPDATE SKIP LOCKED) j ORDER BY x.id),
d AS (
  DELETE FROM pgqueue.job j USING l WHERE j.id = l.id
  RETURNING j.id, j.queue, j.name, j.idempotency_key, nullif(j.claimed_at, '-infinity') - greatest(j.enqueued_at, j.ready_at) AS wait),
k AS MATERIALIZED (
  SELECT e.name, e.key FROM d JOIN pgqueue.effect e ON e.name = d.name AND e.key = d.idempotency_key AND e.job_id = d.id
  ORDER BY e.name, e.key FOR NO KEY UPDATE OF e),
e AS (
  UPDATE pgqueue.effect e SET applied_at = clock_timestamp() FROM k WHERE e.name = k.name AND e.key = k.key),
t AS (
  INSERT INTO pgqueue.tally (queue, name, outcome, n, wait_s)
  SELECT d.queue, d.name, 'ok', count(*), coalesce(extract(epoch FROM sum(d.wait)), 0) FROM d GROUP BY d.queue, d.name)
SELECT d.id FROM d

-- name: seal
-- The last statement of a transactional handler: the job goes with its effects, and the ledger with both. It waits for
-- a lock on the row, as its caller's transaction can do nothing else. A key that another job has taken meanwhile (this
-- one's lease had run out, though nobody took the row) is as good as a lost lease.
WITH k AS MATERIALIZED (
  SELECT e.job_id FROM pgqueue.job j JOIN pgqueue.effect e ON e.name = j.name AND e.key = j.idempotency_key
  WHERE j.id = %(id)s::bigint AND j.lease = %(lease)s::bigint AND e.job_id = j.id AND e.applied_at IS NULL FOR UPDATE OF e),
d AS (
  DELETE FROM pgqueue.job j WHERE j.id = %(id)s::bigint AND j.lease = %(lease)s::bigint
    AND (j.idempotency_key IS NULL OR EXISTS (SELECT FROM k))
  RETURNING j.id, j.queue, j.name, j.idempotency_key, nullif(j.claimed_at, '-infinity') - greatest(j.enqueued_at, j.ready_at) AS wait),
e AS (
  UPDATE pgqueue.effect e SET applied_at = clock_timestamp() FROM d
  WHERE e.name = d.name AND e.key = d.idempotency_key AND e.job_id = d.id),
t AS (
  INSERT INTO pgqueue.tally (queue, name, outcome, n, wait_s) SELECT d.queue, d.name, 'ok', 1, coalesce(extract(epoch FROM d.wait), 0) FROM d)
SELECT d.id FROM d
