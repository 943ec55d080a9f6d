-- Rotating partitions: the hot table in ranges of its position, drained ranges dropped. The columns and indexes of
-- pgqueue.job that a plain job uses; position and id are one number, because a key of a partitioned table must hold the
-- column it is partitioned by.
CREATE SCHEMA rotation;
CREATE SEQUENCE rotation.pos_seq;
CREATE TABLE rotation.job (
  pos         bigint NOT NULL DEFAULT nextval('rotation.pos_seq'),
  lease       bigint NOT NULL DEFAULT 0,
  deadline    timestamptz NOT NULL DEFAULT '-infinity',
  enqueued_at timestamptz NOT NULL DEFAULT now(),
  claimed_at  timestamptz NOT NULL DEFAULT '-infinity',
  priority    smallint NOT NULL DEFAULT 5,
  attempt     smallint NOT NULL DEFAULT 0,
  lost        smallint NOT NULL DEFAULT 0,
  queue       text COLLATE "C" NOT NULL DEFAULT 'bench',
  name        text COLLATE "C" NOT NULL DEFAULT 'bench',
  payload     json NOT NULL,
  PRIMARY KEY (pos)
) PARTITION BY RANGE (pos);
CREATE INDEX job_ready ON rotation.job (queue, priority, pos);

-- One partition more; made ahead of the writers. Attaching takes SHARE UPDATE EXCLUSIVE: nobody waits.
CREATE FUNCTION rotation.add(low bigint, high bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format('CREATE TABLE rotation.job_%s (LIKE rotation.job INCLUDING DEFAULTS INCLUDING INDEXES) WITH (fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_insert_threshold = -1,
    autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off)', low);
  EXECUTE format('ALTER TABLE rotation.job ATTACH PARTITION rotation.job_%s FOR VALUES FROM (%s) TO (%s)', low, low, high);
END $$;

-- Drop the oldest partition if every row of it is gone and no transaction can still bring one: those that may hold the
-- sequence's lock (see docs/adr/0003). false: not now; the lock was not to be had within 50 ms, or rows are left.
CREATE FUNCTION rotation.drop_oldest(low bigint, high bigint) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  left_over boolean;
BEGIN
  IF (SELECT last_value < high FROM rotation.pos_seq) OR EXISTS (
    SELECT FROM pg_catalog.pg_locks l WHERE l.locktype = 'relation' AND l.relation = 'rotation.pos_seq'::regclass
      AND l.mode = 'RowExclusiveLock' AND l.pid <> pg_backend_pid()) THEN
    RETURN false;
  END IF;
  SET LOCAL lock_timeout = '50ms';
  LOCK TABLE ONLY rotation.job IN ACCESS EXCLUSIVE MODE;
  EXECUTE format('SELECT EXISTS (SELECT FROM rotation.job_%s)', low) INTO left_over;
  IF left_over THEN
    RETURN false;
  END IF;
  EXECUTE format('DROP TABLE rotation.job_%s', low);
  RETURN true;
EXCEPTION WHEN lock_not_available THEN
  RETURN false;
END $$;
