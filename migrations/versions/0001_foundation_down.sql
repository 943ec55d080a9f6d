-- Everything 0001_foundation.sql made, and nothing else. Jobs, dead letters and events go with their tables.

DROP VIEW pgqueue.outbox_lag, pgqueue.workers, pgqueue.dead_by_error, pgqueue.queue_gauge, pgqueue.queue_depth;

DROP TABLE pgqueue.inbox_version, pgqueue.inbox, pgqueue.relay_partition, pgqueue.relay, pgqueue.outbox;

DROP TABLE pgqueue.depth_sample, pgqueue.tally_minute, pgqueue.tally, pgqueue.dead_job, pgqueue.attempt_log,
  pgqueue.job_signal, pgqueue.worker, pgqueue.effect, pgqueue.dedup, pgqueue.lane, pgqueue.job, pgqueue.queue,
  pgqueue.job_type;

DROP FUNCTION pgqueue.grant_role, pgqueue.outbox_wake, pgqueue.lane_claim, pgqueue.lane_release, pgqueue.route,
  pgqueue.enqueue, pgqueue.enqueue_many, pgqueue.my_turn, pgqueue.job_fill, pgqueue.job_wake, pgqueue.bucket;

DO $$ BEGIN
  FOR i IN 0..63 LOOP
    EXECUTE pg_catalog.format('DROP SEQUENCE pgqueue.idle_%s', pg_catalog.lpad(i::text, 2, '0'));
    EXECUTE pg_catalog.format('DROP SEQUENCE pgqueue.turn_%s', pg_catalog.lpad(i::text, 2, '0'));
  END LOOP;
END $$;

DROP SEQUENCE pgqueue.outbox_idle, pgqueue.turn_prune, pgqueue.turn_promote, pgqueue.pos_seq;
