-- Takes back what 0002_limits.sql adds, the last section first. `as before` stands for the definition in an older script.

COMMENT ON TABLE pgqueue.alembic_version IS NULL;

-- Sections go below this line, the last one first ----------------------------------------------------------

-- Schedules -----------------------------------------------------------------------------------------------

-- as before: pgqueue.schedule_add

DROP FUNCTION pgqueue.cron_problem(text);

-- Enqueue -------------------------------------------------------------------------------------------------

-- as before: pgqueue.enqueue_many

CREATE OR REPLACE TRIGGER job_wake AFTER INSERT ON pgqueue.job FOR EACH ROW WHEN (NEW.run_at IS NULL) EXECUTE FUNCTION pgqueue.job_wake();

ALTER TABLE pgqueue.job
  DROP CONSTRAINT job_queue_check, DROP CONSTRAINT job_name_check, DROP CONSTRAINT job_place,
  ADD CONSTRAINT job_queue_check CHECK (btrim(queue) <> '' AND octet_length(queue) <= 200),
  ADD CONSTRAINT job_name_check CHECK (btrim(name) <> '' AND octet_length(name) <= 200),
  ADD CONSTRAINT job_place CHECK (num_nonnulls(pos, run_at) = 1);

-- Retry budget --------------------------------------------------------------------------------------------

ALTER TABLE pgqueue.job DROP COLUMN deferred;

-- Dedup keys ----------------------------------------------------------------------------------------------

-- as before: pgqueue.cancel

-- Idempotency keys ----------------------------------------------------------------------------------------

COMMENT ON COLUMN pgqueue.job_history.problem IS 'Why there is no result, where the handler returned one that could not be kept.';

-- as before: pgqueue.complete

-- Batches -------------------------------------------------------------------------------------------------

-- as before: pgqueue.enqueue_batch

DROP VIEW pgqueue.batch_status;

-- as before: pgqueue.batch_status

COMMENT ON VIEW pgqueue.batch_status IS 'Batches: members in all, done, gone (cancelled or discarded), unfinished; the completion job once it is enqueued.';

-- as before: pgqueue.fold_batches

COMMENT ON FUNCTION pgqueue.fold_batches IS 'Count the members that ended and enqueue the completion jobs of whole batches; returns these. Called by workers.';

DROP INDEX pgqueue.batch_retry;
ALTER TABLE pgqueue.batch DROP COLUMN problem, DROP COLUMN retry_at;

-- Operators -----------------------------------------------------------------------------------------------

-- as before: pgqueue.grant_role

-- as before: pgqueue.replay

-- as before: pgqueue.dead_by_error

DROP VIEW pgqueue.unknown_names;

-- Workers -------------------------------------------------------------------------------------------------

-- A view loses no column but by being made anew, and with it the rights that somebody was granted.
SELECT pg_catalog.set_config('pgqueue.rights', coalesce((
  SELECT string_agg(format('GRANT %s ON pgqueue.workers TO %s%s;', a.privilege_type,
      CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END, CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END), ' ')
  FROM pg_catalog.pg_class c CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) a
  WHERE c.oid = 'pgqueue.workers'::regclass AND a.grantee <> c.relowner), ''), true);

DROP VIEW pgqueue.workers;

-- as before: pgqueue.workers

DO $$ BEGIN EXECUTE coalesce(nullif(current_setting('pgqueue.rights', true), ''), 'SELECT'); END $$;

ALTER TABLE pgqueue.worker DROP COLUMN overrun;

-- Outbox --------------------------------------------------------------------------------------------------

DROP FUNCTION pgqueue.outbox_repartition(int);

-- Limits --------------------------------------------------------------------------------------------------

DROP TRIGGER limit_waiting_new ON pgqueue.job_type;
DROP TRIGGER limit_waiting ON pgqueue.job_type;
DROP TRIGGER job_key ON pgqueue.job;
DROP TRIGGER lane_key_slots ON pgqueue.job_type;
DROP TRIGGER lane_rested ON pgqueue.job_type;

-- as before: pgqueue.route

-- as before: pgqueue.lane_unblock

-- as before: pgqueue.lane_release

-- as before: pgqueue.lane_slots

-- as before: pgqueue.lane_claim

-- as before: pgqueue.age

-- as before: pgqueue.job_state

-- as before: pgqueue.queue_depth

DROP FUNCTION pgqueue.limit_waiting, pgqueue.lane_rested, pgqueue.lane_grow, pgqueue.lane_wake, pgqueue.limit_queue, pgqueue.limit_job, pgqueue.gate_pass, pgqueue.gate, pgqueue.job_key, pgqueue.limit_key, pgqueue.is_limit;
DROP TABLE pgqueue.permit;
DROP INDEX pgqueue.lane_ready;
CREATE INDEX lane_ready ON pgqueue.lane (queue, priority, pos) WHERE priority >= 0;
DROP INDEX pgqueue.lane_parked;
ALTER TABLE pgqueue.lane DROP COLUMN wake_at;
ALTER TABLE pgqueue.queue DROP CONSTRAINT queue_rate, DROP CONSTRAINT queue_burst, DROP COLUMN slots;
ALTER TABLE pgqueue.job_type DROP COLUMN key_slots, DROP COLUMN key_rate_per_s, DROP COLUMN limits_set;

-- End of limits.

-- Prune ---------------------------------------------------------------------------------------------------

DROP INDEX pgqueue.dedup_until;
