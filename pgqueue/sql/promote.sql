-- name: promote
-- Jobs whose time has come get a place in the queue, if it is this process's turn. Nothing is due below the floor.
-- A full page leaves the turn to whoever asks next: there is more to do.
WITH t AS MATERIALIZED (SELECT pgqueue.my_turn('promote', %(period)s::interval) AS mine),
c AS MATERIALIZED (
  SELECT j.id FROM pgqueue.job j
  WHERE (SELECT t.mine FROM t) AND j.run_at <= statement_timestamp() AND j.run_at >= %(floor)s::timestamptz
  ORDER BY j.run_at LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED),
u AS (
  UPDATE pgqueue.job j SET pos = nextval('pgqueue.pos_seq'), ready_at = j.run_at, run_at = NULL FROM c WHERE j.id = c.id
  RETURNING j.queue, j.ready_at)
SELECT count(*), max(u.ready_at), coalesce(array_agg(DISTINCT u.queue), '{}'),
  CASE WHEN count(*) = 1000 THEN pg_catalog.setval('pgqueue.turn_promote', (extract(epoch FROM clock_timestamp()) * 1000)::bigint) END
FROM u

-- name: notify
-- Wake the idle workers of these queues.
SELECT pg_catalog.pg_notify(c.channel, '') FROM (
  SELECT DISTINCT 'pgqueue_' || pgqueue.bucket(q) AS channel FROM unnest(%(queues)s::text[]) q) c
