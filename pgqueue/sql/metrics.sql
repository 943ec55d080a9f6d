-- What the page of metrics shows beside the counters of its process; read from the views, at most 1,000 rows each.

-- name: patience
SELECT pg_catalog.set_config('statement_timeout', '5s', false)

-- name: queues
SELECT g.queue, g.ready, g.delayed, g.in_flight, g.blocked, g.oldest_ready_s, g.sampled_s_ago FROM pgqueue.queue_gauge g ORDER BY g.queue LIMIT 1000

-- name: ended
-- Ends of jobs in the last full minute.
SELECT m.queue, m.name, m.outcome, sum(m.n)::bigint FROM pgqueue.tally_minute m
WHERE m.minute = date_trunc('minute', now() - interval '1 min') GROUP BY m.queue, m.name, m.outcome ORDER BY m.queue, m.name, m.outcome LIMIT 1000

-- name: dead
SELECT r.queue, coalesce(r.error_type, ''), r.jobs FROM pgqueue.dead_rate r ORDER BY r.jobs DESC LIMIT 1000

-- name: unknown
SELECT u.queue, u.name, u.jobs FROM pgqueue.unknown_names u ORDER BY u.jobs DESC LIMIT 1000

-- name: schedules
SELECT s.name, s.state, s.late_s FROM pgqueue.schedule_status s ORDER BY s.name LIMIT 1000

-- name: workers
SELECT count(*) FILTER (WHERE w.alive), count(*) FILTER (WHERE NOT w.alive),
  coalesce(sum(w.overrun) FILTER (WHERE w.alive), 0) FROM pgqueue.workers w

-- name: outbox
SELECT o.pending, o.parked, o.blocked_aggregates, o.oldest_pending_s, o.relays, o.orphan_partitions FROM pgqueue.outbox_lag o
