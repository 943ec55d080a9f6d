-- Jobs, lanes, dead letters, outbox, relay, inbox. One installation per database: schema pgqueue.
--
-- Reading order: a job is a row of `job` until it is done (deleted) or dead (moved to `dead_job`).
-- Rules that the shape of `job` keeps, and why:
--   * no column that a claim writes stands in an index or may be NULL before it: the claim is a HOT update;
--   * a job has exactly one place: `pos` (in the queue) or `run_at` (waiting for its time);
--   * `lease` is the fence of every later write; 0 means nobody holds the row;
--   * job_route and lane_ready serve only queries that repeat their always true predicate: a plan made while the tables are
--     empty, where all indexes cost the same, must not read a whole queue to find one key;
--   * key columns are COLLATE "C": immune to a change of the system's collation.

CREATE SEQUENCE pgqueue.pos_seq;

CREATE TABLE pgqueue.job_type (
  name         text COLLATE "C" PRIMARY KEY CHECK (btrim(name) <> '' AND octet_length(name) <= 200),
  queue        text COLLATE "C" CHECK (btrim(queue) <> '' AND octet_length(queue) <= 200),
  priority     smallint CHECK (priority BETWEEN 0 AND 9),
  max_attempts smallint CHECK (max_attempts > 0),
  timeout_s    real CHECK (timeout_s > 0),
  backoff      json,
  slots        smallint CHECK (slots > 0),
  rate_per_s   double precision CHECK (rate_per_s > 0),
  paused       boolean NOT NULL DEFAULT false,
  sheddable    boolean NOT NULL DEFAULT false,
  on_dead      text CHECK (on_dead IN ('continue', 'block')),
  keep_s       double precision CHECK (keep_s > 0),
  declared_at  timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE pgqueue.job_type IS 'Policy by job name; NULL = the built-in default. Written by workers at start and by pgqueue sync.';

CREATE TABLE pgqueue.queue (
  name       text COLLATE "C" PRIMARY KEY CHECK (btrim(name) <> '' AND octet_length(name) <= 200),
  paused     boolean NOT NULL DEFAULT false,
  max_depth  bigint CHECK (max_depth BETWEEN 1 AND 100000),
  max_age_s  double precision CHECK (max_age_s > 0),
  age_after_s double precision CHECK (age_after_s >= 1),
  rate_per_s real,
  burst      real,
  tat        timestamptz
);
COMMENT ON TABLE pgqueue.queue IS 'Settings of a queue; a queue without a row has the defaults.';

CREATE TABLE pgqueue.job (
  id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  pos             bigint DEFAULT nextval('pgqueue.pos_seq'),
  lease           bigint NOT NULL DEFAULT 0,
  deadline        timestamptz NOT NULL DEFAULT '-infinity',
  enqueued_at     timestamptz NOT NULL DEFAULT now(),
  run_at          timestamptz,
  ready_at        timestamptz,
  claimed_at      timestamptz NOT NULL DEFAULT '-infinity',
  expires_at      timestamptz,
  aged_at         timestamptz,
  timeout_s       real CHECK (timeout_s > 0),
  priority        smallint NOT NULL CHECK (priority BETWEEN 0 AND 9),
  attempt         smallint NOT NULL DEFAULT 0 CHECK (attempt >= 0),
  lost            smallint NOT NULL DEFAULT 0,
  max_attempts    smallint CHECK (max_attempts > 0),
  queue           text COLLATE "C" NOT NULL CHECK (btrim(queue) <> '' AND octet_length(queue) <= 200),
  name            text COLLATE "C" NOT NULL CHECK (btrim(name) <> '' AND octet_length(name) <= 200),
  key             text COLLATE "C" CHECK (key <> '' AND octet_length(key) <= 512),
  dedup_key       text COLLATE "C" CHECK (dedup_key <> '' AND octet_length(dedup_key) <= 512),
  idempotency_key text COLLATE "C" CHECK (idempotency_key <> '' AND octet_length(idempotency_key) <= 512),
  backoff         json,
  headers         json,
  payload         json NOT NULL DEFAULT 'null',
  CONSTRAINT job_place CHECK (num_nonnulls(pos, run_at) = 1),
  CONSTRAINT job_run_at CHECK (isfinite(run_at)),
  CONSTRAINT job_lease CHECK ((lease = 0) = (deadline = '-infinity'))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
        autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
CREATE INDEX job_ready ON pgqueue.job (queue, priority, pos) WHERE pos IS NOT NULL AND key IS NULL;
CREATE INDEX job_due ON pgqueue.job (run_at) WHERE run_at IS NOT NULL;
CREATE INDEX job_lane ON pgqueue.job (queue, key, id) WHERE pos IS NOT NULL AND key IS NOT NULL;
CREATE INDEX job_route ON pgqueue.job (queue, pos) WHERE pos > 0 AND key IS NOT NULL;
COMMENT ON TABLE pgqueue.job IS 'Live jobs only. A finished job is deleted, a failed one moves to dead_job.';

CREATE TABLE pgqueue.lane (
  queue     text COLLATE "C" NOT NULL,
  key       text COLLATE "C" NOT NULL,
  slot      smallint NOT NULL DEFAULT 0,
  pos       bigint NOT NULL DEFAULT nextval('pgqueue.pos_seq'),
  lease     bigint NOT NULL DEFAULT 0,
  deadline  timestamptz NOT NULL DEFAULT '-infinity',
  priority  smallint NOT NULL,
  head_name text COLLATE "C" NOT NULL,
  lost      smallint NOT NULL DEFAULT 0,
  rest_until timestamptz NOT NULL DEFAULT '-infinity',
  PRIMARY KEY (queue, key, slot)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
CREATE INDEX lane_ready ON pgqueue.lane (queue, priority, pos) WHERE priority >= 0;
COMMENT ON TABLE pgqueue.lane IS 'The row that serialises one ordering key of one queue; lease and deadline as on a job.';

CREATE TABLE pgqueue.dedup (
  queue  text COLLATE "C" NOT NULL,
  key    text COLLATE "C" NOT NULL,
  job_id bigint NOT NULL,
  until  timestamptz,
  PRIMARY KEY (queue, key)
) WITH (fillfactor = 80);
COMMENT ON COLUMN pgqueue.dedup.until IS 'End of the window; NULL = the key is taken as long as the job lives.';

CREATE TABLE pgqueue.effect (
  name       text COLLATE "C" NOT NULL,
  key        text COLLATE "C" NOT NULL,
  job_id     bigint NOT NULL,
  lease      bigint NOT NULL,
  applied_at timestamptz,
  PRIMARY KEY (name, key)
) WITH (fillfactor = 70);
CREATE INDEX effect_applied ON pgqueue.effect (applied_at) WHERE applied_at IS NOT NULL;
COMMENT ON TABLE pgqueue.effect IS 'The idempotency ledger: which (job name, idempotency key) has been applied.';

CREATE TABLE pgqueue.budget (
  queue   text COLLATE "C" PRIMARY KEY,
  tokens  double precision NOT NULL,
  granted double precision NOT NULL,
  at      timestamptz NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE pgqueue.budget IS 'Retry tokens of a queue, shared by its workers; granted is the answer to the last draw.';

CREATE TABLE pgqueue.worker (
  nonce       bigint PRIMARY KEY,
  host        text NOT NULL,
  pid         int NOT NULL,
  version     text NOT NULL,
  queues      text[] NOT NULL,
  names       text[] NOT NULL,
  schedules   text[] NOT NULL DEFAULT '{}',
  concurrency int NOT NULL,
  in_flight   int NOT NULL DEFAULT 0,
  draining    boolean NOT NULL DEFAULT false,
  started_at  timestamptz NOT NULL DEFAULT now(),
  beat_at     timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);
COMMENT ON COLUMN pgqueue.worker.nonce IS 'Upper half of every lease this process start hands out.';

CREATE TABLE pgqueue.job_signal (
  job_id  bigint PRIMARY KEY,
  signal  text NOT NULL DEFAULT 'cancel' CHECK (signal = 'cancel'),
  sent_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE pgqueue.attempt_log (
  job_id     bigint NOT NULL,
  attempt    smallint NOT NULL,
  outcome    text NOT NULL CHECK (outcome IN ('retry', 'lost', 'timeout', 'dead')),
  lease      bigint NOT NULL,
  started_at timestamptz,
  at         timestamptz NOT NULL DEFAULT clock_timestamp(),
  worker     text,
  error_type text,
  error      text,
  traceback  text
);
CREATE INDEX attempt_log_job ON pgqueue.attempt_log (job_id, at);
COMMENT ON TABLE pgqueue.attempt_log IS 'One row per unsuccessful attempt of a live job; moves along with the dead letter.';

CREATE TABLE pgqueue.dead_job (
  id               bigint PRIMARY KEY,
  queue            text COLLATE "C" NOT NULL,
  name             text COLLATE "C" NOT NULL,
  priority         smallint NOT NULL,
  key              text COLLATE "C",
  dedup_key        text COLLATE "C",
  idempotency_key  text COLLATE "C",
  attempt          smallint NOT NULL,
  lost             smallint NOT NULL,
  max_attempts     smallint,
  timeout_s        real,
  backoff          json,
  headers          json,
  payload          json NOT NULL,
  enqueued_at      timestamptz NOT NULL,
  expires_at       timestamptz,
  first_attempt_at timestamptz,
  last_attempt_at  timestamptz,
  died_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
  reason           text NOT NULL CHECK (reason IN ('exhausted', 'permanent', 'worker lost', 'undecodable', 'timeout', 'expired', 'cancelled')),
  error_type       text,
  error            text,
  traceback        text,
  worker           text,
  trace_id         text,
  attempts         json NOT NULL DEFAULT '[]',
  blocks           boolean NOT NULL DEFAULT false
);
CREATE INDEX dead_job_at ON pgqueue.dead_job (died_at, id);
CREATE INDEX dead_job_error ON pgqueue.dead_job (error_type, died_at);
CREATE INDEX dead_job_lane ON pgqueue.dead_job (queue, key) WHERE blocks;
COMMENT ON COLUMN pgqueue.dead_job.blocks IS 'The ordering key of this job waits until a person replays or discards it (job_type.on_dead).';

CREATE TABLE pgqueue.tally (
  at      timestamptz NOT NULL DEFAULT now(),
  queue   text COLLATE "C" NOT NULL,
  name    text COLLATE "C" NOT NULL,
  outcome text COLLATE "C" NOT NULL,
  n       int NOT NULL,
  wait_s  double precision NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE TABLE pgqueue.tally_minute (
  minute  timestamptz NOT NULL,
  queue   text COLLATE "C" NOT NULL,
  name    text COLLATE "C" NOT NULL,
  outcome text COLLATE "C" NOT NULL,
  n       bigint NOT NULL,
  wait_s  double precision NOT NULL DEFAULT 0,
  PRIMARY KEY (minute, queue, name, outcome)
);
COMMENT ON TABLE pgqueue.tally IS 'Counters, appended once per batch in the transaction that finishes it, folded into tally_minute.';

CREATE TABLE pgqueue.depth_sample (
  queue          text COLLATE "C" PRIMARY KEY,
  at             timestamptz NOT NULL,
  ready          bigint NOT NULL,
  delayed        bigint NOT NULL,
  in_flight      bigint NOT NULL,
  blocked        bigint NOT NULL,
  oldest_ready_s double precision NOT NULL,
  capped         boolean NOT NULL
) WITH (fillfactor = 50);

-- Wake-up. An idle worker of a queue stores "idle until" (ms since 1970) in the sequence of the queue's bucket;
-- an insert notifies the bucket's channel only while somebody idles, because NOTIFY takes a database-wide lock
-- at commit. Reading a sequence is free of locks and of rows.
CREATE FUNCTION pgqueue.bucket(queue text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
$$ SELECT pg_catalog.lpad((pg_catalog.hashtextextended(queue, 0) OPERATOR(pg_catalog.&) 63)::pg_catalog.text, 2, '0') $$;

DO $$ BEGIN
  FOR i IN 0..63 LOOP
    EXECUTE pg_catalog.format('CREATE SEQUENCE pgqueue.idle_%s MINVALUE 0 START 0', pg_catalog.lpad(i::text, 2, '0'));
    EXECUTE pg_catalog.format('GRANT SELECT ON SEQUENCE pgqueue.idle_%s TO PUBLIC', pg_catalog.lpad(i::text, 2, '0'));
  END LOOP;
END $$;

CREATE FUNCTION pgqueue.job_wake() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF pg_catalog.pg_sequence_last_value(('pgqueue.idle_' || pgqueue.bucket(NEW.queue))::pg_catalog.regclass)
       > extract(epoch FROM pg_catalog.clock_timestamp()) * 1000
     AND pg_catalog.current_setting('pgqueue.notify', true) IS DISTINCT FROM 'off' THEN
    PERFORM pg_catalog.pg_notify('pgqueue_' || pgqueue.bucket(NEW.queue), '');
  END IF;
  RETURN NULL;
END $$;
CREATE FUNCTION pgqueue.wake(queue text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF pg_sequence_last_value(('pgqueue.idle_' || pgqueue.bucket($1))::regclass) > extract(epoch FROM clock_timestamp()) * 1000
     AND current_setting('pgqueue.notify', true) IS DISTINCT FROM 'off' THEN
    PERFORM pg_notify('pgqueue_' || pgqueue.bucket($1), '');
  END IF;
END $$;
COMMENT ON FUNCTION pgqueue.wake IS 'Notify the idle workers of a queue at commit: a job that was there before has become ready.';
CREATE TRIGGER job_wake AFTER INSERT ON pgqueue.job FOR EACH ROW WHEN (NEW.run_at IS NULL) EXECUTE FUNCTION pgqueue.job_wake();

-- Turns. Work that is to be done by one process of many (sweep, promote, prune) is taken by turn: the sequence of the
-- task holds when it is due next (ms since 1970). No leader: whoever asks first after that time has the turn.
DO $$ BEGIN
  FOR i IN 0..63 LOOP
    EXECUTE pg_catalog.format('CREATE SEQUENCE pgqueue.turn_%s MINVALUE 0 START 0', pg_catalog.lpad(i::text, 2, '0'));
  END LOOP;
END $$;
CREATE SEQUENCE pgqueue.turn_promote MINVALUE 0 START 0;
CREATE SEQUENCE pgqueue.turn_prune MINVALUE 0 START 0;
CREATE SEQUENCE pgqueue.turn_age MINVALUE 0 START 0;
CREATE SEQUENCE pgqueue.turn_schedule MINVALUE 0 START 0;
CREATE SEQUENCE pgqueue.turn_batch MINVALUE 0 START 0;

CREATE FUNCTION pgqueue.my_turn(task text, period interval) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  seq    regclass := ('pgqueue.turn_' || task)::regclass;
  now_ms bigint := extract(epoch FROM clock_timestamp()) * 1000;
BEGIN
  -- A due time more than a minute ahead is a clock that went back, not a turn that was taken.
  IF pg_sequence_last_value(seq) BETWEEN now_ms + 1 AND now_ms + 60000 THEN
    RETURN false;
  END IF;
  IF NOT pg_try_advisory_xact_lock(1885827445, hashtext(task)) THEN
    RETURN false;
  END IF;
  IF pg_sequence_last_value(seq) BETWEEN now_ms + 1 AND now_ms + 60000 THEN
    RETURN false;
  END IF;
  PERFORM setval(seq, now_ms + least(extract(epoch FROM period) * 1000, 60000)::bigint);
  RETURN true;
END $$;

-- A plain INSERT of name and payload is enough: what it leaves out comes from the job type here. Rows that the enqueue
-- functions write are complete, and pass by the WHEN.
CREATE FUNCTION pgqueue.job_fill() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  kind record;
BEGIN
  SELECT t.queue, t.priority, t.slots INTO kind FROM pgqueue.job_type t WHERE t.name = NEW.name;
  NEW.queue := coalesce(NEW.queue, kind.queue, 'default');
  NEW.priority := coalesce(NEW.priority, kind.priority, 5);
  IF NEW.key IS NULL AND kind.slots IS NOT NULL THEN
    NEW.key := '@' || NEW.name;
  END IF;
  IF NEW.run_at IS NOT NULL THEN
    NEW.pos := NULL;
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER job_fill BEFORE INSERT ON pgqueue.job FOR EACH ROW
  WHEN (NEW.queue IS NULL OR NEW.priority IS NULL OR (NEW.run_at IS NOT NULL AND NEW.pos IS NOT NULL)) EXECUTE FUNCTION pgqueue.job_fill();

-- Pressure. A queue with a limit is full while its sample says so; a sample older than 30 s says nothing.
CREATE FUNCTION pgqueue.queue_full(queue text) RETURNS int LANGUAGE sql STABLE AS $$
  -- By Little's law the oldest job's age is about the time in which the queue drains, so a part of it drains the excess.
  SELECT least(greatest(ceil(greatest(
           d.oldest_ready_s - q.max_age_s, d.oldest_ready_s * (1 - q.max_depth::double precision / n.depth))), 5), 60)::int
  FROM pgqueue.queue q
  JOIN pgqueue.depth_sample d ON d.queue = q.name
  CROSS JOIN LATERAL (SELECT greatest(d.ready + d.in_flight + d.blocked, 1) AS depth) n
  WHERE q.name = queue_full.queue AND d.at > clock_timestamp() - interval '30 s'
    AND (n.depth >= q.max_depth OR d.oldest_ready_s >= q.max_age_s)
$$;
COMMENT ON FUNCTION pgqueue.queue_full IS 'Seconds after which to try again where the queue is over its max_depth or max_age_s; NULL where it takes jobs.';

-- What a call with a taken dedup key changes in the modes replace and debounce. The caller holds the key's row, so that calls
-- of one key take turns. A job that is leased, or locked by whoever claims or cancels it, stays as it is: false. Runs with the
-- owner's rights: a producer may not touch jobs in any other way.
CREATE FUNCTION pgqueue.dedup_change(queue text, dedup_key text, name text, payload json, due timestamptz, debounce boolean, latest interval)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  early boolean;
BEGIN
  WITH l AS MATERIALIZED (
    SELECT j.id, j.run_at, CASE
      WHEN NOT debounce AND j.attempt = 0 THEN due
      WHEN NOT debounce THEN greatest(j.run_at, due) -- a failed job waits out its backoff
      ELSE greatest(j.run_at, least(due, j.enqueued_at + latest)) END AS target
    FROM pgqueue.dedup d JOIN pgqueue.job j ON j.id = d.job_id
    WHERE d.queue = $1 AND d.key = $2 AND j.name = $3 AND j.lease = 0 FOR NO KEY UPDATE OF j SKIP LOCKED),
  t AS (SELECT l.id, l.run_at AS was, CASE WHEN l.target > clock_timestamp() THEN l.target END AS run_at FROM l),
  u AS (
    UPDATE pgqueue.job j SET payload = $4, run_at = t.run_at,
      pos = CASE WHEN t.run_at IS NULL THEN coalesce(j.pos, nextval('pgqueue.pos_seq')) END,
      ready_at = CASE WHEN t.run_at IS NULL AND t.was IS NOT NULL THEN least(t.was, clock_timestamp()) ELSE j.ready_at END
    FROM t WHERE j.id = t.id RETURNING t.was IS NOT NULL AND j.run_at IS NULL AS early)
  SELECT u.early INTO early FROM u;
  IF early THEN
    PERFORM pgqueue.wake($1);
  END IF;
  RETURN early IS NOT NULL;
END $$;
REVOKE ALL ON FUNCTION pgqueue.dedup_change FROM PUBLIC;

-- Enqueue. The only writer of job rows that fills in policy: every producer, whatever its language, writes the same row.
CREATE FUNCTION pgqueue.enqueue_many(
  name text, payloads json,
  queue text DEFAULT NULL, priority int DEFAULT NULL, run_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL,
  keys text[] DEFAULT NULL, dedup_keys text[] DEFAULT NULL, dedup_window interval DEFAULT '1 hour', dedup_live boolean DEFAULT false,
  idempotency_keys text[] DEFAULT NULL, max_attempts int DEFAULT NULL, timeout_s real DEFAULT NULL, backoff json DEFAULT NULL,
  expires_at timestamptz DEFAULT NULL, headers json DEFAULT NULL, when_full text DEFAULT 'raise',
  else_queue text DEFAULT NULL, else_priority int DEFAULT NULL, headers_each json[] DEFAULT NULL,
  dedup_mode text DEFAULT 'keep', dedup_max_wait interval DEFAULT NULL)
RETURNS TABLE (id bigint, created boolean, changed boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  kind    record;
  to_q    text;
  to_prio smallint;
  wait_s  int;
  due     timestamptz;
  problem text;
  r       record;
  jid     bigint;
  got     bigint;
  ids     bigint[] := '{}';
  made    boolean[] := '{}';
  altered boolean[] := '{}';
BEGIN
  -- A producer's mistake is said here, in words; a CHECK would say it with the whole row, payload included.
  problem := CASE
    WHEN btrim(coalesce(enqueue_many.name, '')) = '' THEN 'a job needs a name'
    WHEN octet_length(enqueue_many.name) > 200 THEN 'the name has more than 200 bytes'
    WHEN json_typeof(payloads) IS DISTINCT FROM 'array' THEN 'payloads must be a JSON array, one element per job'
    WHEN btrim(enqueue_many.queue) = '' THEN 'queue is blank'
    WHEN octet_length(enqueue_many.queue) > 200 THEN 'queue has more than 200 bytes'
    WHEN enqueue_many.priority NOT BETWEEN 0 AND 9 THEN format('priority is %s, not 0 to 9 (lower runs first)', enqueue_many.priority)
    WHEN enqueue_many.max_attempts NOT BETWEEN 1 AND 32767 THEN format('max_attempts is %s, not 1 to 32767', enqueue_many.max_attempts)
    WHEN enqueue_many.timeout_s <= 0 OR enqueue_many.timeout_s = 'NaN' THEN format('timeout_s is %s, not above 0 (Infinity: no timeout)', enqueue_many.timeout_s)
    WHEN NOT isfinite(enqueue_many.run_at) THEN format('run_at is %s, not a time', enqueue_many.run_at)
    WHEN delay NOT BETWEEN interval '0' AND interval '3650 days' THEN format('delay is %s, not between 0 and ten years', delay)
    WHEN dedup_keys IS NOT NULL AND NOT dedup_live AND (dedup_window IS NULL OR dedup_window <= interval '0' OR dedup_window > interval '3650 days')
      THEN format('dedup_window is %s, not above 0 and up to ten years', dedup_window)
    WHEN json_typeof(enqueue_many.headers) <> 'object' THEN 'headers must be a JSON object'
    WHEN octet_length(enqueue_many.headers::text) > 65536 THEN 'headers have more than 65536 bytes'
    WHEN json_typeof(enqueue_many.backoff) <> 'object' THEN 'backoff must be a JSON object: {"base": 1, "cap": 300, "jitter": "full"}'
    WHEN num_nulls(keys, dedup_keys, idempotency_keys) < 3
      AND NOT (json_array_length(payloads) = ALL (ARRAY[cardinality(keys), cardinality(dedup_keys), cardinality(idempotency_keys)]))
      THEN 'there must be one key for each payload'
    WHEN headers_each IS NOT NULL AND (dedup_keys IS NOT NULL OR cardinality(headers_each) <> json_array_length(payloads))
      THEN 'headers_each must hold one object for each payload, and goes without dedup keys'
  END;
  IF problem IS NULL AND (dedup_mode IS DISTINCT FROM 'keep' OR dedup_max_wait IS NOT NULL) THEN
    problem := CASE
      WHEN dedup_mode IS NULL OR dedup_mode NOT IN ('keep', 'replace', 'debounce') THEN format('dedup_mode is %L, not keep, replace or debounce', dedup_mode)
      WHEN dedup_max_wait IS NOT NULL AND dedup_mode <> 'debounce' THEN 'dedup_max_wait goes with dedup_mode debounce'
      WHEN dedup_keys IS NULL THEN format('dedup_mode %s goes with a dedup key', dedup_mode)
      WHEN dedup_mode = 'debounce' AND num_nonnulls(enqueue_many.run_at, delay) = 0 THEN 'dedup_mode debounce needs a delay, which each call starts anew'
      WHEN dedup_max_wait NOT BETWEEN interval '1 millisecond' AND interval '3650 days' THEN format('dedup_max_wait is %s, not above 0 and up to ten years', dedup_max_wait)
    END;
  END IF;
  IF problem IS NULL AND enqueue_many.backoff IS NOT NULL THEN
    problem := CASE
      WHEN json_typeof(enqueue_many.backoff->'base') <> 'number' OR json_typeof(enqueue_many.backoff->'cap') <> 'number'
        OR (enqueue_many.backoff->>'jitter') NOT IN ('full', 'equal', 'decorrelated', 'none') THEN 'backoff is no {"base": 1, "cap": 300, "jitter": "full"}'
      WHEN (enqueue_many.backoff->>'base')::numeric NOT BETWEEN 0.000001 AND 315360000
        OR (enqueue_many.backoff->>'cap')::numeric NOT BETWEEN 0.000001 AND 315360000 THEN 'backoff: base and cap are seconds, above 0 and up to ten years'
    END;
  END IF;
  IF problem IS NULL AND num_nulls(keys, dedup_keys, idempotency_keys) < 3 THEN
    SELECT format('key %L is blank or has more than 512 bytes', left(k, 40)) INTO problem
    FROM unnest(keys || dedup_keys || idempotency_keys) k WHERE btrim(k) = '' OR octet_length(k) > 512 LIMIT 1;
  END IF;
  IF problem IS NULL AND octet_length(payloads::text) > 1048576 THEN
    SELECT format('a payload has %s bytes, more than 1048576: store it elsewhere and enqueue a reference', max(octet_length(e.value::text))) INTO problem
    FROM json_array_elements(payloads) e HAVING max(octet_length(e.value::text)) > 1048576;
  END IF;
  IF problem IS NULL AND (strpos(payloads::text, E'\\u') > 0 OR strpos(enqueue_many.headers::text, E'\\u') > 0) THEN
    -- json takes NUL and lone surrogates, which no handler could read; jsonb refuses them.
    BEGIN
      IF payloads::text ~ E'\\\\u(0000|[dD][89a-fA-F])' THEN PERFORM payloads::jsonb; END IF;
      IF enqueue_many.headers::text ~ E'\\\\u(0000|[dD][89a-fA-F])' THEN PERFORM enqueue_many.headers::jsonb; END IF;
    EXCEPTION WHEN untranslatable_character OR invalid_text_representation THEN
      problem := 'payload or headers hold a NUL character or a lone surrogate, which Postgres cannot read back; take it out';
    END;
  END IF;
  IF problem IS NOT NULL THEN
    RAISE EXCEPTION USING MESSAGE = format('pgqueue.enqueue of job %L: %s', left(enqueue_many.name, 200), problem), ERRCODE = '22023';
  END IF;
  due := least(coalesce(enqueue_many.run_at, clock_timestamp() + enqueue_many.delay), clock_timestamp() + dedup_max_wait);
  IF due <= clock_timestamp() THEN
    due := NULL;
  END IF;

  SELECT t.name, t.queue, t.priority, t.slots, t.sheddable, num_nonnulls(q.max_depth, q.max_age_s) > 0 AS limited INTO kind
  FROM (VALUES (enqueue_many.name)) n(name)
  LEFT JOIN pgqueue.job_type t ON t.name = n.name
  LEFT JOIN pgqueue.queue q ON q.name = coalesce(enqueue_many.queue, t.queue, CASE WHEN t.name IS NULL THEN else_queue END, 'default');
  IF kind.slots IS NOT NULL AND keys IS NOT NULL THEN
    RAISE EXCEPTION 'pgqueue.enqueue of job %: it has a limit of % at once, so it takes no ordering key', enqueue_many.name, kind.slots
      USING ERRCODE = '22023';
  END IF;
  -- else_..: what the caller's code declares, until the type is declared in the database.
  to_q := coalesce(enqueue_many.queue, kind.queue, CASE WHEN kind.name IS NULL THEN else_queue END, 'default');
  to_prio := coalesce(enqueue_many.priority, kind.priority, CASE WHEN kind.name IS NULL THEN else_priority END, 5);

  IF kind.limited AND when_full <> 'ignore' AND json_array_length(payloads) > 0 THEN
    wait_s := pgqueue.queue_full(to_q);
    IF wait_s IS NOT NULL AND kind.sheddable THEN
      INSERT INTO pgqueue.tally (queue, name, outcome, n) VALUES (to_q, enqueue_many.name, 'shed', json_array_length(payloads));
      RETURN QUERY SELECT 0::bigint, false, false FROM generate_series(1, json_array_length(payloads));
      RETURN;
    ELSIF wait_s IS NOT NULL AND when_full = 'tell' THEN
      RETURN QUERY SELECT -wait_s::bigint, false, false;
      RETURN;
    ELSIF wait_s IS NOT NULL THEN
      RAISE EXCEPTION 'queue % is full; try again in % s', to_q, wait_s
        USING ERRCODE = '53400', HINT = 'The limits are in pgqueue.queue: max_depth, max_age_s.';
    END IF;
  END IF;

  IF dedup_keys IS NULL THEN
    RETURN QUERY
      INSERT INTO pgqueue.job AS j (name, queue, priority, pos, run_at, key, idempotency_key, max_attempts, timeout_s, backoff, expires_at, headers, payload)
      SELECT enqueue_many.name, to_q, to_prio, CASE WHEN due IS NULL THEN nextval('pgqueue.pos_seq') END, due,
             coalesce(p.key, CASE WHEN kind.slots IS NOT NULL THEN '@' || enqueue_many.name END), p.idem,
             enqueue_many.max_attempts, enqueue_many.timeout_s, enqueue_many.backoff, enqueue_many.expires_at, coalesce(p.headers, enqueue_many.headers), p.value
      FROM ROWS FROM (json_array_elements(payloads), unnest(keys), unnest(idempotency_keys), unnest(headers_each)) WITH ORDINALITY p(value, key, idem, headers, n)
      ORDER BY p.n
      RETURNING j.id, true, false;
    RETURN;
  END IF;

  -- Keys in order, so that two bulk calls cannot deadlock. A key that is not free returns its job: no lock, no number drawn.
  FOR r IN
    SELECT p.* FROM ROWS FROM (json_array_elements(payloads), unnest(keys), unnest(idempotency_keys), unnest(dedup_keys)) WITH ORDINALITY p(value, key, idem, dedup, n)
    ORDER BY p.dedup COLLATE "C", p.n
  LOOP
    IF r.dedup IS NULL THEN
      RAISE EXCEPTION 'pgqueue.enqueue of job %: there is no dedup key for payload %', enqueue_many.name, r.n USING ERRCODE = '22023';
    END IF;
    jid := NULL;
    FOR turn IN 1..10 LOOP
      SELECT d.job_id INTO got FROM pgqueue.dedup d
      WHERE d.queue = to_q AND d.key = r.dedup
        AND CASE WHEN d.until IS NULL THEN EXISTS (SELECT FROM pgqueue.job j WHERE j.id = d.job_id) ELSE d.until > clock_timestamp() END;
      IF FOUND AND dedup_mode <> 'keep' THEN
        -- Calls that change the job of one key take turns; whose it is then is asked anew.
        PERFORM FROM pgqueue.dedup d WHERE d.queue = to_q AND d.key = r.dedup FOR NO KEY UPDATE;
        SELECT d.job_id INTO got FROM pgqueue.dedup d
        WHERE d.queue = to_q AND d.key = r.dedup
          AND CASE WHEN d.until IS NULL THEN EXISTS (SELECT FROM pgqueue.job j WHERE j.id = d.job_id) ELSE d.until > clock_timestamp() END;
      END IF;
      IF FOUND THEN
        ids[r.n] := got; made[r.n] := false; altered[r.n] := false;
        IF dedup_mode <> 'keep' THEN
          altered[r.n] := pgqueue.dedup_change(to_q, r.dedup, enqueue_many.name, r.value, due, dedup_mode = 'debounce', dedup_max_wait);
          IF altered[r.n] AND NOT dedup_live THEN
            UPDATE pgqueue.dedup d SET until = clock_timestamp() + dedup_window WHERE d.queue = to_q AND d.key = r.dedup AND d.until IS NOT NULL;
          END IF;
        END IF;
        EXIT;
      END IF;
      jid := coalesce(jid, nextval(pg_get_serial_sequence('pgqueue.job', 'id')));
      INSERT INTO pgqueue.dedup (queue, key, job_id, until)
      VALUES (to_q, r.dedup, jid, CASE WHEN NOT dedup_live THEN clock_timestamp() + dedup_window END) ON CONFLICT DO NOTHING;
      IF NOT FOUND THEN
        UPDATE pgqueue.dedup d SET job_id = jid, until = CASE WHEN NOT dedup_live THEN clock_timestamp() + dedup_window END
        WHERE d.queue = to_q AND d.key = r.dedup
          AND CASE WHEN d.until IS NULL THEN NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.id = d.job_id) ELSE d.until <= clock_timestamp() END;
        CONTINUE WHEN NOT FOUND;
      END IF;
      INSERT INTO pgqueue.job (id, name, queue, priority, pos, run_at, key, dedup_key, idempotency_key, max_attempts, timeout_s, backoff, expires_at, headers, payload)
      OVERRIDING SYSTEM VALUE
      VALUES (jid, enqueue_many.name, to_q, to_prio, CASE WHEN due IS NULL THEN nextval('pgqueue.pos_seq') END, due,
              coalesce(r.key, CASE WHEN kind.slots IS NOT NULL THEN '@' || enqueue_many.name END), r.dedup, r.idem,
              enqueue_many.max_attempts, enqueue_many.timeout_s, enqueue_many.backoff, enqueue_many.expires_at, enqueue_many.headers, r.value);
      ids[r.n] := jid; made[r.n] := true; altered[r.n] := false;
      EXIT;
    END LOOP;
    IF ids[r.n] IS NULL THEN
      RAISE EXCEPTION 'dedup key % of queue % changed hands ten times', r.dedup, to_q USING ERRCODE = '55P03';
    END IF;
  END LOOP;
  RETURN QUERY SELECT u.i, u.c, u.a FROM unnest(ids, made, altered) WITH ORDINALITY u(i, c, a, n) ORDER BY u.n;
END $$;
COMMENT ON FUNCTION pgqueue.enqueue_many IS 'Enqueue one job per element of payloads in the current transaction; ids in the order of payloads. '
  'changed: the waiting job of a taken dedup key took the payload and time of this call (dedup_mode replace, debounce). Where the queue is full: '
  'a sheddable job is dropped and has id 0; when_full raise: SQLSTATE 53400; tell: one row with the negative of the seconds to wait; ignore: enqueue.';

CREATE FUNCTION pgqueue.enqueue(
  name text, payload json DEFAULT 'null',
  queue text DEFAULT NULL, priority int DEFAULT NULL, run_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL,
  key text DEFAULT NULL, dedup_key text DEFAULT NULL, dedup_window interval DEFAULT '1 hour', dedup_live boolean DEFAULT false,
  idempotency_key text DEFAULT NULL, max_attempts int DEFAULT NULL, timeout_s real DEFAULT NULL, backoff json DEFAULT NULL,
  expires_at timestamptz DEFAULT NULL, headers json DEFAULT NULL, dedup_mode text DEFAULT 'keep', dedup_max_wait interval DEFAULT NULL)
RETURNS bigint LANGUAGE sql AS $$
  SELECT m.id FROM pgqueue.enqueue_many(name, json_build_array(payload), queue, priority, run_at, delay,
    CASE WHEN key IS NOT NULL THEN ARRAY[key] END, CASE WHEN dedup_key IS NOT NULL THEN ARRAY[dedup_key] END, dedup_window, dedup_live,
    CASE WHEN idempotency_key IS NOT NULL THEN ARRAY[idempotency_key] END, max_attempts, timeout_s, backoff, expires_at, headers,
    dedup_mode => dedup_mode, dedup_max_wait => dedup_max_wait) m
$$;
COMMENT ON FUNCTION pgqueue.enqueue IS 'Enqueue one job in the current transaction; returns its id (of the existing job where dedup_key is taken).';

-- Lanes. The claim of keyed jobs: route makes sure that each key has its lane, lane_claim takes lanes and hands out
-- the oldest jobs of each, lane_release gives lanes back. Lock and emptiness test are separate statements on purpose:
-- one statement judges "no job left" on a snapshot older than its lock and loses jobs.
CREATE FUNCTION pgqueue.route(queues text[], floors bigint[])
RETURNS TABLE (ord int, examined int, last_pos bigint) LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off AS $$
DECLARE
  ks text[]; ps smallint[]; ns text[]; have int; stale text[];
BEGIN
  FOR i IN 1 .. cardinality(queues) LOOP
    WITH s AS MATERIALIZED (
      SELECT j.id, j.pos, j.key, j.priority, j.name FROM pgqueue.job j
      WHERE j.queue = queues[i] AND j.pos > floors[i] AND j.pos > 0 AND j.key IS NOT NULL ORDER BY j.pos LIMIT 5000),
    d AS (SELECT DISTINCT ON (s.key) s.key, s.priority, s.name FROM s ORDER BY s.key, s.id)
    SELECT (SELECT count(*) FROM s), (SELECT max(s.pos) FROM s),
           array_agg(d.key ORDER BY d.key), array_agg(d.priority ORDER BY d.key), array_agg(d.name ORDER BY d.key)
    INTO examined, last_pos, ks, ps, ns FROM d;
    ord := i;
    RETURN NEXT;
    CONTINUE WHEN ks IS NULL;
    LOOP
      WITH p AS MATERIALIZED (
        SELECT t.k, l.lease = 0 AND l.head_name <> t.n AS other FROM unnest(ks, ns) t(k, n) -- in order, one look-up each: before 17, = ANY with an ORDER BY reads all lanes of the queue
        CROSS JOIN LATERAL (SELECT l.lease, l.head_name FROM pgqueue.lane l WHERE l.queue = queues[i] AND l.key = t.k AND l.slot = 0 FOR KEY SHARE) l)
      SELECT count(*), array_agg(p.k) FILTER (WHERE p.other) INTO have, stale FROM p;
      EXIT WHEN have = cardinality(ks);
      INSERT INTO pgqueue.lane (queue, key, slot, priority, head_name)
      SELECT queues[i], d.k, g, d.p, d.n FROM unnest(ks, ps, ns) d(k, p, n)
      LEFT JOIN pgqueue.job_type t ON d.k = '@' || d.n AND t.name = d.n
      CROSS JOIN generate_series(0, coalesce(t.slots, 1) - 1) g
      WHERE NOT EXISTS (SELECT FROM pgqueue.lane l WHERE l.queue = queues[i] AND l.key = d.k AND l.slot = 0)
      ORDER BY d.k, g ON CONFLICT DO NOTHING;
    END LOOP;
    IF stale IS NOT NULL THEN -- a lane may have outlived the job that it is named after, or a late commit come in front of that
      PERFORM pgqueue.lane_refresh(array_fill(queues[i], ARRAY[cardinality(stale)]), stale);
    END IF;
  END LOOP;
END $$;

-- A key whose head died under the policy block waits for a person: its lane has no deadline. The dead letter itself says so,
-- written in the transaction of the death, so a crash forgets nothing. A letter that somebody is just moving (xmax) says
-- nothing yet: the lane is looked at again soon, and whoever moves it takes the lane's lock after it to undo a wait without end.
CREATE FUNCTION pgqueue.lane_wait(queue text, key text) RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
  SELECT CASE bool_or(d.xmax = 0) WHEN true THEN 'infinity' WHEN false THEN clock_timestamp() + interval '1 s' END
  FROM pgqueue.dead_job d WHERE d.queue = $1 AND d.key = $2 AND d.blocks
$$;
COMMENT ON FUNCTION pgqueue.lane_wait IS 'Until when a key is blocked by a dead letter; NULL where it is not.';

CREATE FUNCTION pgqueue.lane_unblock(queues text[], keys text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF cardinality(queues) IS NULL THEN
    RETURN;
  END IF;
  PERFORM FROM pgqueue.lane l JOIN unnest(queues, keys) t(q, k) ON l.queue = t.q AND l.key = t.k
  ORDER BY l.queue, l.key, l.slot FOR NO KEY UPDATE OF l;
  UPDATE pgqueue.lane l SET pos = nextval('pgqueue.pos_seq'), priority = coalesce(h.priority, l.priority), head_name = coalesce(h.name, l.head_name),
    deadline = CASE WHEN l.lease <> 0 THEN coalesce((
      SELECT max(j.deadline) FROM pgqueue.job j WHERE j.queue = l.queue AND j.key = l.key AND j.pos IS NOT NULL AND j.lease = l.lease), '-infinity')
      ELSE '-infinity' END
  FROM unnest(queues, keys) t(q, k) LEFT JOIN LATERAL (
    SELECT j.priority, j.name FROM pgqueue.job j WHERE j.queue = t.q AND j.key = t.k AND j.pos IS NOT NULL AND j.lease = 0 ORDER BY j.id LIMIT 1) h ON true
  WHERE l.queue = t.q AND l.key = t.k AND l.deadline = 'infinity' AND pgqueue.lane_wait(t.q, t.k) IS NULL;
  PERFORM pgqueue.wake(t.q) FROM (SELECT DISTINCT u.q FROM unnest(queues) u(q)) t;
END $$;
COMMENT ON FUNCTION pgqueue.lane_unblock IS 'Let keys go on whose blocking dead letters are gone; runs after these were moved, in the same transaction.';

CREATE FUNCTION pgqueue.lane_release(queues text[], keys text[], places bigint[], my_lease bigint, wait interval, keep_lost boolean DEFAULT false)
RETURNS int LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off AS $$
DECLARE
  n int; dq text[]; dk text[]; ds smallint[];
BEGIN
  WITH mine AS MATERIALIZED (
    SELECT l.queue, l.key, l.slot FROM unnest(queues, keys, places) t(q, k, p)
    CROSS JOIN LATERAL (SELECT l.queue, l.key, l.slot FROM pgqueue.lane l
                        WHERE l.queue = t.q AND l.key = t.k AND l.pos = coalesce(t.p, l.pos) AND l.lease = my_lease FOR NO KEY UPDATE SKIP LOCKED) l)
  UPDATE pgqueue.lane l SET lease = 0,
    deadline = CASE WHEN EXISTS (SELECT FROM pgqueue.dead_job d WHERE d.queue = l.queue AND d.key = l.key AND d.blocks)
      THEN coalesce(pgqueue.lane_wait(l.queue, l.key), '-infinity')
      ELSE greatest(CASE WHEN wait = interval '0' THEN '-infinity' ELSE clock_timestamp() + wait END, nullif(l.rest_until, '-infinity')) END,
    pos = nextval('pgqueue.pos_seq'), lost = CASE WHEN keep_lost THEN l.lost ELSE 0 END,
    priority = coalesce(h.priority, l.priority), head_name = coalesce(h.name, l.head_name)
  FROM mine LEFT JOIN LATERAL (SELECT j.priority, j.name FROM pgqueue.job j WHERE j.queue = mine.queue AND j.key = mine.key
    AND j.pos IS NOT NULL AND j.lease = 0 ORDER BY j.id LIMIT 1) h ON true
  WHERE l.queue = mine.queue AND l.key = mine.key AND l.slot = mine.slot;
  GET DIAGNOSTICS n = ROW_COUNT;
  -- Never while slot 0, for which route looks, is held or rests: the next burst needs all slots.
  SELECT array_agg(f.queue), array_agg(f.key), array_agg(f.slot) INTO dq, dk, ds FROM (
    SELECT e.*, bool_or(e.slot = 0) OVER (PARTITION BY e.queue, e.key) AS first FROM (
      SELECT l.* FROM (SELECT DISTINCT u.q, u.k FROM unnest(queues, keys) u(q, k)) t
      CROSS JOIN LATERAL (SELECT l.queue, l.key, l.slot FROM pgqueue.lane l WHERE l.queue = t.q AND l.key = t.k AND l.lease = 0
        AND l.rest_until <= clock_timestamp() AND NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = t.q AND j.key = t.k AND j.pos IS NOT NULL)
        FOR UPDATE SKIP LOCKED) l) e) f
  WHERE f.first OR NOT EXISTS (SELECT FROM pgqueue.lane o WHERE o.queue = f.queue AND o.key = f.key AND o.slot = 0);
  IF dq IS NOT NULL THEN
    DELETE FROM pgqueue.lane l USING unnest(dq, dk, ds) d(q, k, s)
    WHERE l.queue = d.q AND l.key = d.k AND l.slot = d.s
      AND NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = d.q AND j.key = d.k AND j.pos IS NOT NULL);
  END IF;
  RETURN n;
END $$;

-- A limit that is raised gives the jobs that wait more slots at once; lane_claim takes away what is above a lower one.
CREATE FUNCTION pgqueue.lane_slots() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO pgqueue.lane (queue, key, slot, priority, head_name)
  SELECT l.queue, l.key, g, l.priority, l.head_name
  FROM (SELECT DISTINCT ON (a.queue) a.* FROM pgqueue.lane a WHERE a.key = '@' || NEW.name ORDER BY a.queue, a.slot) l
  CROSS JOIN generate_series(0, NEW.slots - 1) g
  ORDER BY l.queue, g ON CONFLICT DO NOTHING;
  RETURN NULL;
END $$;
CREATE TRIGGER lane_slots AFTER UPDATE OF slots ON pgqueue.job_type FOR EACH ROW
  WHEN (NEW.slots IS DISTINCT FROM OLD.slots AND NEW.slots IS NOT NULL) EXECUTE FUNCTION pgqueue.lane_slots();

CREATE FUNCTION pgqueue.lane_claim(queues text[], prios smallint[], floors bigint[], names text[], k int, m int, total int, new_lease bigint, vt interval)
RETURNS TABLE (ord bigint, lane_pos bigint, id bigint, queue text, key text, name text, priority smallint, attempt smallint,
               max_attempts smallint, timeout_s real, lost smallint, enqueued_at timestamptz, expires_at timestamptz,
               idempotency_key text, backoff text, headers text, payload text)
LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  r record; took int; handed int := 0; left_behind int; eq text[] := '{}'; ek text[] := '{}'; ep bigint[] := '{}'; lim int;
  kind record; rest interval; surplus boolean; head record; orphan boolean;
BEGIN
  FOR r IN
    WITH w AS MATERIALIZED (
      SELECT v.o, x.* FROM unnest(lane_claim.queues, lane_claim.prios, lane_claim.floors) WITH ORDINALITY v(q, p, f, o)
      CROSS JOIN LATERAL (SELECT l.queue, l.key, l.slot, l.pos, l.head_name FROM pgqueue.lane l
        WHERE l.queue = v.q AND l.priority = v.p AND l.priority >= 0 AND l.pos > v.f AND l.deadline <= statement_timestamp()
          AND l.head_name = ANY (lane_claim.names)
        ORDER BY l.pos LIMIT 5000) x)
    SELECT w.o, w.pos, y.* FROM w
    CROSS JOIN LATERAL (SELECT l.queue, l.key, l.slot, l.lease, l.lost FROM pgqueue.lane l
      WHERE l.queue = w.queue AND l.key = w.key AND l.slot = w.slot AND l.deadline <= statement_timestamp()
        AND l.rest_until <= statement_timestamp() AND l.head_name = ANY (lane_claim.names)
      FOR NO KEY UPDATE SKIP LOCKED) y
    LIMIT lane_claim.k
  LOOP
    EXIT WHEN handed >= lane_claim.total;
    rest := NULL; surplus := false; orphan := false;
    IF r.key LIKE '@%' THEN
      SELECT t.slots, t.rate_per_s INTO kind FROM pgqueue.job_type t WHERE t.name = substr(r.key, 2);
      surplus := coalesce(r.slot >= kind.slots, false); -- the limit was lowered
      rest := kind.slots / kind.rate_per_s * interval '1 s'; -- of a rate, each slot keeps its share
    END IF;
    IF r.lease = 0 THEN
      IF surplus THEN
        DELETE FROM pgqueue.lane l WHERE l.queue = r.queue AND l.key = r.key AND l.slot = r.slot;
        CONTINUE;
      END IF;
      SELECT j.id, j.lease, j.deadline INTO head FROM pgqueue.job j
      WHERE j.queue = r.queue AND j.key = r.key AND j.pos IS NOT NULL ORDER BY j.id LIMIT 1;
      IF head.lease <> 0 THEN
        -- A stamp that no lane stands for: its holder gave the lane back without writing the job off, and was lost.
        orphan := head.deadline <= clock_timestamp()
          AND NOT EXISTS (SELECT FROM pgqueue.lane o WHERE o.queue = r.queue AND o.key = r.key AND o.lease = head.lease);
        IF orphan THEN
          WITH g AS MATERIALIZED (
            SELECT j.id FROM pgqueue.job j WHERE j.id = head.id AND j.lease = head.lease AND j.deadline <= clock_timestamp() FOR NO KEY UPDATE SKIP LOCKED),
          s AS (
            UPDATE pgqueue.job j SET lease = 0, deadline = '-infinity', lost = j.lost + 1 FROM g WHERE j.id = g.id RETURNING j.id, j.attempt, j.claimed_at)
          INSERT INTO pgqueue.attempt_log (job_id, attempt, outcome, lease, started_at, error_type, error, worker)
          SELECT s.id, s.attempt, 'lost', head.lease, s.claimed_at, 'WorkerLost', 'the worker vanished: its lease ran out unrenewed',
                 (SELECT w.host || ':' || w.pid FROM pgqueue.worker w WHERE w.nonce = head.lease >> 32)
          FROM s;
        END IF;
        -- A free slot of a key whose jobs all run already stays as it is; a lane without any job is taken, to be deleted.
        CONTINUE WHEN NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = r.queue AND j.key = r.key AND j.pos IS NOT NULL AND j.lease = 0);
      END IF;
    END IF;
    lim := least(lane_claim.m, lane_claim.total - handed);
    IF rest IS NOT NULL THEN -- no more at once than a tenth of a second is worth
      lim := least(lim, greatest(1, floor(0.1 / extract(epoch FROM rest))::int));
    END IF;
    IF r.lease <> 0 THEN
      -- Take over: strip the last holder's stamps, or leave the lane as it is if one of them is locked: its ack may be under way.
      WITH g AS MATERIALIZED (
        SELECT j.id FROM pgqueue.job j WHERE j.queue = r.queue AND j.key = r.key AND j.pos IS NOT NULL AND j.lease = r.lease
        ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED),
      behind AS MATERIALIZED (
        SELECT (SELECT count(*) FROM pgqueue.job j WHERE j.queue = r.queue AND j.key = r.key AND j.pos IS NOT NULL AND j.lease = r.lease)
             - (SELECT count(*) FROM g) AS n),
      s AS (
        UPDATE pgqueue.job j SET lease = 0, deadline = '-infinity', lost = j.lost + (j.id = (SELECT min(g2.id) FROM g g2))::int
        FROM g WHERE j.id = g.id AND (SELECT behind.n FROM behind) = 0 RETURNING j.id, j.attempt, j.claimed_at),
      logged AS (
        INSERT INTO pgqueue.attempt_log (job_id, attempt, outcome, lease, started_at, error_type, error, worker)
        SELECT s.id, s.attempt, 'lost', r.lease, s.claimed_at, 'WorkerLost', 'the worker vanished: its lease ran out unrenewed',
               (SELECT w.host || ':' || w.pid FROM pgqueue.worker w WHERE w.nonce = r.lease >> 32)
        FROM s WHERE s.id = (SELECT min(g2.id) FROM g g2))
      SELECT behind.n INTO left_behind FROM behind;
      CONTINUE WHEN left_behind > 0;
      lim := 1;
      IF surplus THEN
        DELETE FROM pgqueue.lane l WHERE l.queue = r.queue AND l.key = r.key AND l.slot = r.slot;
        CONTINUE;
      END IF;
    ELSIF r.lost > 0 OR orphan THEN
      lim := 1;
    END IF;
    UPDATE pgqueue.lane l SET lease = lane_claim.new_lease, deadline = clock_timestamp() + lane_claim.vt, lost = l.lost + (r.lease <> 0)::int
    WHERE l.queue = r.queue AND l.key = r.key AND l.slot = r.slot
      AND NOT EXISTS (SELECT FROM pgqueue.dead_job d WHERE d.queue = r.queue AND d.key = r.key AND d.blocks);
    IF NOT FOUND THEN
      UPDATE pgqueue.lane l SET lease = 0, deadline = coalesce(pgqueue.lane_wait(r.queue, r.key), '-infinity')
      WHERE l.queue = r.queue AND l.key = r.key AND l.slot = r.slot;
      CONTINUE;
    END IF;
    RETURN QUERY
      WITH h AS MATERIALIZED (
        SELECT z.id, z.tid FROM (SELECT j.id, j.tid, bool_and(j.name = ANY (lane_claim.names)) OVER (ORDER BY j.id) AS mine
          FROM (SELECT j0.id, j0.ctid AS tid, j0.name FROM pgqueue.job j0
                WHERE j0.queue = r.queue AND j0.key = r.key AND j0.pos IS NOT NULL AND j0.lease = 0 ORDER BY j0.id LIMIT lim) j) z WHERE z.mine),
      g AS MATERIALIZED (
        SELECT y.id FROM h
        CROSS JOIN LATERAL (SELECT j.id FROM pgqueue.job j WHERE j.ctid = h.tid AND j.id = h.id AND j.lease = 0 FOR NO KEY UPDATE SKIP LOCKED) y)
      UPDATE pgqueue.job j SET lease = lane_claim.new_lease, deadline = clock_timestamp() + lane_claim.vt, attempt = j.attempt + 1, claimed_at = statement_timestamp()
      FROM g WHERE j.id = g.id
        AND j.id < coalesce((SELECT min(h.id) FROM h WHERE NOT EXISTS (SELECT FROM g g2 WHERE g2.id = h.id)), 9223372036854775807)
      RETURNING r.o, r.pos, j.id, j.queue, j.key, j.name, j.priority, j.attempt, j.max_attempts, j.timeout_s, j.lost, j.enqueued_at, j.expires_at,
                j.idempotency_key, j.backoff::text, j.headers::text, j.payload::text;
    GET DIAGNOSTICS took = ROW_COUNT;
    handed := handed + took;
    IF took > 0 AND rest IS NOT NULL THEN
      UPDATE pgqueue.lane l SET rest_until = clock_timestamp() + took * rest WHERE l.queue = r.queue AND l.key = r.key AND l.slot = r.slot;
    END IF;
    IF took = 0 THEN
      eq := eq || r.queue; ek := ek || r.key; ep := ep || r.pos;
    END IF;
  END LOOP;
  IF cardinality(eq) > 0 THEN
    PERFORM pgqueue.lane_release(eq, ek, ep, lane_claim.new_lease, interval '0', true);
  END IF;
END $$;

-- Dead letters: find them, put them back into the queue, throw them away.
CREATE FUNCTION pgqueue.json_at(value json, path text[]) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
  RETURN value #>> path;
EXCEPTION WHEN untranslatable_character OR invalid_text_representation THEN
  RETURN NULL; -- a row that somebody inserted with a NUL or a lone surrogate must not spoil the search of the others
END $$;
COMMENT ON FUNCTION pgqueue.json_at IS 'The value at a path of a JSON document as text; NULL where there is none.';

CREATE FUNCTION pgqueue.dead_letters(
  error_type text DEFAULT NULL, reason text DEFAULT NULL, name text DEFAULT NULL, queue text DEFAULT NULL,
  since timestamptz DEFAULT NULL, until timestamptz DEFAULT NULL, matching json DEFAULT NULL)
RETURNS SETOF pgqueue.dead_job LANGUAGE sql STABLE AS $$
  SELECT d.* FROM pgqueue.dead_job d
  WHERE (dead_letters.error_type IS NULL OR d.error_type = dead_letters.error_type)
    AND (dead_letters.reason IS NULL OR d.reason = dead_letters.reason)
    AND (dead_letters.name IS NULL OR d.name = dead_letters.name)
    AND (dead_letters.queue IS NULL OR d.queue = dead_letters.queue)
    AND (dead_letters.since IS NULL OR d.died_at >= dead_letters.since)
    AND (dead_letters.until IS NULL OR d.died_at < dead_letters.until)
    AND (dead_letters.matching IS NULL OR NOT EXISTS (
      SELECT FROM json_each_text(dead_letters.matching) m
      WHERE pgqueue.json_at(d.payload, string_to_array(m.key, '.')) IS DISTINCT FROM m.value))
$$;
COMMENT ON FUNCTION pgqueue.dead_letters IS 'Dead letters by what is given; matching: {"order.id": "17"} compares values of the payload as text.';

-- One statement moves the rows, so a crash leaves each job in exactly one place, and of two operators at once each row
-- goes with one. The id is kept: a job with an ordering key goes back to its place. The log of its attempts, the last
-- one included, goes back too; the attempts start again.
CREATE FUNCTION pgqueue.replay(ids bigint[], payload json DEFAULT NULL) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  queues text[];
  keys   text[];
BEGIN
  SELECT array_agg(b.queue), array_agg(b.key) INTO queues, keys
  FROM (SELECT DISTINCT d.queue, d.key FROM pgqueue.dead_job d WHERE d.id = ANY (replay.ids) AND d.blocks) b;
  IF replay.payload IS NOT NULL THEN
    IF cardinality(ids) <> 1 THEN
      RAISE EXCEPTION 'pgqueue.replay: a new payload goes with one job, not with %', cardinality(ids) USING ERRCODE = '22023';
    END IF;
    PERFORM replay.payload::jsonb; -- refuses NUL and lone surrogates, which no handler could read
  END IF;
  RETURN QUERY
    WITH page AS MATERIALIZED (
      SELECT d.id FROM pgqueue.dead_job d WHERE d.id = ANY (replay.ids) ORDER BY d.id FOR UPDATE SKIP LOCKED),
    gone AS (
      DELETE FROM pgqueue.dead_job d USING page WHERE d.id = page.id RETURNING d.*),
    signals AS (
      DELETE FROM pgqueue.job_signal s USING gone WHERE s.job_id = gone.id),
    log AS (
      INSERT INTO pgqueue.attempt_log (job_id, attempt, outcome, lease, started_at, at, worker, error_type, error, traceback)
      SELECT g.id, a.attempt, a.outcome, 0, a.started_at, a.at, a.worker, a.error_type, a.error, a.traceback
      FROM gone g CROSS JOIN LATERAL json_to_recordset(g.attempts) AS a(
        attempt smallint, outcome text, started_at timestamptz, at timestamptz, worker text, error_type text, error text, traceback text)
      UNION ALL
      SELECT g.id, g.attempt, 'dead', 0, g.last_attempt_at, g.died_at, g.worker, g.error_type, g.error, g.traceback FROM gone g),
    counted AS (
      INSERT INTO pgqueue.tally (queue, name, outcome, n)
      SELECT g.queue, g.name, 'replayed', count(*) FROM gone g GROUP BY g.queue, g.name)
    INSERT INTO pgqueue.job AS j (id, queue, name, priority, key, dedup_key, idempotency_key, max_attempts, timeout_s,
      backoff, headers, payload, enqueued_at, expires_at, ready_at)
    OVERRIDING SYSTEM VALUE
    SELECT g.id, g.queue, g.name, g.priority, g.key, g.dedup_key, g.idempotency_key, g.max_attempts, g.timeout_s,
      g.backoff, g.headers, coalesce(replay.payload, g.payload), g.enqueued_at,
      CASE WHEN g.expires_at > clock_timestamp() THEN g.expires_at END, clock_timestamp()
    FROM gone g ORDER BY g.id
    RETURNING j.id;
  PERFORM pgqueue.lane_unblock(queues, keys);
END $$;
COMMENT ON FUNCTION pgqueue.replay IS 'Put dead letters back into their queues; returns the ids that were there. payload replaces that of one job.';

-- The state of one job, by the same rules as the view queue_depth.
CREATE FUNCTION pgqueue.job_state(id bigint) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT CASE
    WHEN j.lease <> 0 AND j.deadline > now() THEN 'in_flight'
    WHEN j.run_at > now() THEN 'delayed'
    WHEN j.key IS NOT NULL AND j.run_at IS NULL AND coalesce(t.slots, 1) <= (
      SELECT count(*) FROM (SELECT FROM pgqueue.job b
        WHERE b.queue = j.queue AND b.key = j.key AND b.pos IS NOT NULL AND b.id < j.id LIMIT coalesce(t.slots, 1)) b) THEN 'blocked'
    WHEN l.lease = 0 AND l.deadline > now() AND l.deadline < 'infinity' THEN 'delayed'
    WHEN q.paused OR t.paused OR l.deadline = 'infinity' THEN 'blocked'
    ELSE 'ready' END
  FROM pgqueue.job j
  LEFT JOIN pgqueue.queue q ON q.name = j.queue
  LEFT JOIN pgqueue.job_type t ON t.name = j.name
  LEFT JOIN pgqueue.lane l ON j.key IS NOT NULL AND j.run_at IS NULL AND l.queue = j.queue AND l.key = j.key AND l.slot = 0
  WHERE j.id = job_state.id
$$;
COMMENT ON FUNCTION pgqueue.job_state IS 'ready, delayed, blocked or in_flight; NULL where there is no live job of that id.';

-- Changes of jobs that nobody holds. A leased row is never locked, and one that somebody has locked is passed: it is being
-- claimed, cancelled or changed at this moment. The answer says of each id what became of it: changed, held, dead or gone.
CREATE FUNCTION pgqueue.lane_refresh(queues text[], keys text[]) RETURNS void LANGUAGE sql AS $$
  UPDATE pgqueue.lane l SET priority = h.priority, head_name = h.name
  FROM (SELECT DISTINCT u.q, u.k FROM unnest(queues, keys) u(q, k)) t
  CROSS JOIN LATERAL (SELECT x.slot FROM pgqueue.lane x WHERE x.queue = t.q AND x.key = t.k AND x.lease = 0 FOR NO KEY UPDATE SKIP LOCKED) x
  CROSS JOIN LATERAL (SELECT j.priority, j.name FROM pgqueue.job j
    WHERE j.queue = t.q AND j.key = t.k AND j.pos IS NOT NULL AND j.lease = 0 ORDER BY j.id LIMIT 1) h
  WHERE l.queue = t.q AND l.key = t.k AND l.slot = x.slot AND (l.priority, l.head_name) IS DISTINCT FROM (h.priority, h.name)
$$;
COMMENT ON FUNCTION pgqueue.lane_refresh IS 'Give free lanes the priority and name of their heads, after these have changed. A lane in hand gets them when it is given back.';

CREATE FUNCTION pgqueue.changes(ids bigint[], done bigint[]) RETURNS TABLE (id bigint, state text) LANGUAGE sql STABLE AS $$
  SELECT i.id, CASE
    WHEN i.id = ANY (done) THEN 'changed'
    WHEN EXISTS (SELECT FROM pgqueue.job j WHERE j.id = i.id) THEN 'held'
    WHEN EXISTS (SELECT FROM pgqueue.dead_job d WHERE d.id = i.id) THEN 'dead'
    ELSE 'gone' END
  FROM unnest(ids) WITH ORDINALITY i(id, n) ORDER BY i.n
$$;

CREATE FUNCTION pgqueue.reprioritise(ids bigint[], priority int) RETURNS TABLE (id bigint, state text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  done bigint[]; qs text[]; ks text[];
BEGIN
  IF $2 IS NULL OR $2 NOT BETWEEN 0 AND 9 THEN
    RAISE EXCEPTION 'pgqueue.reprioritise: priority is %, not 0 to 9 (lower runs first)', $2 USING ERRCODE = '22023';
  END IF;
  WITH l AS MATERIALIZED (
    SELECT j.id FROM pgqueue.job j WHERE j.id = ANY ($1) AND j.lease = 0 ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED),
  u AS (
    UPDATE pgqueue.job j SET priority = $2,
      pos = CASE WHEN j.pos IS NOT NULL AND j.key IS NULL AND j.priority <> $2 THEN nextval('pgqueue.pos_seq') ELSE j.pos END
    FROM l WHERE j.id = l.id RETURNING j.id, j.queue, j.key)
  SELECT coalesce(array_agg(u.id), '{}'), array_agg(u.queue) FILTER (WHERE u.key IS NOT NULL), array_agg(u.key) FILTER (WHERE u.key IS NOT NULL)
  INTO done, qs, ks FROM u;
  PERFORM pgqueue.lane_refresh(qs, ks);
  RETURN QUERY SELECT * FROM pgqueue.changes($1, done);
END $$;
COMMENT ON FUNCTION pgqueue.reprioritise IS 'Give waiting jobs another priority, behind those that have it; of a key the head decides.';

CREATE FUNCTION pgqueue.move(ids bigint[], queue text) RETURNS TABLE (id bigint, state text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  done bigint[]; qs text[]; ks text[];
BEGIN
  IF btrim(coalesce($2, '')) = '' OR octet_length($2) > 200 THEN
    RAISE EXCEPTION 'pgqueue.move: the queue is blank or has more than 200 bytes' USING ERRCODE = '22023';
  END IF;
  WITH l AS MATERIALIZED (
    SELECT j.id, j.queue, j.key FROM pgqueue.job j WHERE j.id = ANY ($1) AND j.lease = 0 ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED),
  u AS (
    UPDATE pgqueue.job j SET queue = $2,
      pos = CASE WHEN j.pos IS NOT NULL AND j.queue <> $2 THEN nextval('pgqueue.pos_seq') ELSE j.pos END
    FROM l WHERE j.id = l.id RETURNING j.id)
  SELECT coalesce((SELECT array_agg(u.id) FROM u), '{}'), array_agg(l.queue) FILTER (WHERE l.key IS NOT NULL), array_agg(l.key) FILTER (WHERE l.key IS NOT NULL)
  INTO done, qs, ks FROM l;
  IF ks IS NOT NULL THEN
    PERFORM pgqueue.lane_refresh(qs || array_fill($2, ARRAY[cardinality(ks)]), ks || ks);
  END IF;
  PERFORM pgqueue.wake($2);
  RETURN QUERY SELECT * FROM pgqueue.changes($1, done);
END $$;
COMMENT ON FUNCTION pgqueue.move IS 'Move waiting jobs to the end of another queue; among the jobs of a key they stand by their ids there too.';

CREATE FUNCTION pgqueue.edit(id bigint, payload json) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  n int;
BEGIN
  IF $2 IS NULL OR octet_length($2::text) > 1048576 THEN
    RAISE EXCEPTION 'pgqueue.edit: there is no payload, or it has more than 1048576 bytes' USING ERRCODE = '22023';
  END IF;
  PERFORM $2::jsonb; -- refuses NUL and lone surrogates, which no handler could read
  WITH l AS MATERIALIZED (SELECT j.id FROM pgqueue.job j WHERE j.id = $1 AND j.lease = 0 FOR NO KEY UPDATE SKIP LOCKED),
  u AS (UPDATE pgqueue.job j SET payload = $2 FROM l WHERE j.id = l.id RETURNING j.id),
  k AS MATERIALIZED (SELECT d.id FROM pgqueue.dead_job d WHERE d.id = $1 FOR NO KEY UPDATE SKIP LOCKED),
  v AS (UPDATE pgqueue.dead_job d SET payload = $2 FROM k WHERE d.id = k.id RETURNING d.id)
  SELECT count(*) INTO n FROM (SELECT u.id FROM u UNION ALL SELECT v.id FROM v) c;
  RETURN CASE WHEN n > 0 THEN 'changed'
    WHEN EXISTS (SELECT FROM pgqueue.job j WHERE j.id = $1) OR EXISTS (SELECT FROM pgqueue.dead_job d WHERE d.id = $1) THEN 'held' ELSE 'gone' END;
END $$;
COMMENT ON FUNCTION pgqueue.edit IS 'Give a job that waits, or a dead letter, another payload: changed, held (it runs, or somebody moves it) or gone.';

-- Aging. In a queue with age_after_s a job that has waited that long goes up one level, to the end of it, and waits anew: so
-- every job comes to level 0 some day, where the order is that of arrival. Positions follow the time since which jobs wait,
-- so the first entries of a level tell who is next; a page a level and call keeps it short.
CREATE FUNCTION pgqueue.age(page int DEFAULT 1000) RETURNS int LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  q record; n int; total int := 0; ks text[];
BEGIN
  FOR q IN SELECT c.name, clock_timestamp() - c.age_after_s * interval '1 s' AS limit_at FROM pgqueue.queue c WHERE c.age_after_s IS NOT NULL AND NOT c.paused LOOP
    WITH w AS MATERIALIZED (
      SELECT x.* FROM generate_series(1, 9) p(level)
      CROSS JOIN LATERAL (
        SELECT y.id, y.priority, y.pos FROM (
          SELECT j.id, j.priority, j.pos, j.lease, greatest(j.enqueued_at, j.ready_at, j.aged_at) AS since FROM pgqueue.job j
          WHERE j.queue = q.name AND j.priority = p.level AND j.pos IS NOT NULL AND j.key IS NULL ORDER BY j.pos LIMIT 5000) y
        WHERE y.lease = 0 AND y.since <= q.limit_at LIMIT age.page) x),
    l AS MATERIALIZED (
      SELECT y.id, w.priority, w.pos FROM w CROSS JOIN LATERAL (
        SELECT j.id FROM pgqueue.job j WHERE j.id = w.id AND j.lease = 0 AND j.priority = w.priority FOR NO KEY UPDATE SKIP LOCKED) y),
    o AS MATERIALIZED (SELECT s.id, nextval('pgqueue.pos_seq') AS pos FROM (SELECT l.id FROM l ORDER BY l.priority, l.pos) s)
    UPDATE pgqueue.job j SET priority = j.priority - 1, pos = o.pos, aged_at = clock_timestamp() FROM o WHERE j.id = o.id;
    GET DIAGNOSTICS n = ROW_COUNT;
    total := total + n;
    WITH w AS MATERIALIZED (
      SELECT DISTINCT x.key FROM generate_series(1, 9) p(level)
      CROSS JOIN LATERAL (
        SELECT l.key FROM pgqueue.lane l WHERE l.queue = q.name AND l.priority = p.level AND l.priority >= 0
          AND l.lease = 0 AND l.deadline <= clock_timestamp() ORDER BY l.pos LIMIT age.page) x),
    h AS MATERIALIZED (
      SELECT y.id FROM w CROSS JOIN LATERAL (
        SELECT j.id, j.priority, greatest(j.enqueued_at, j.ready_at, j.aged_at) AS since FROM pgqueue.job j
        WHERE j.queue = q.name AND j.key = w.key AND j.pos IS NOT NULL AND j.lease = 0 ORDER BY j.id LIMIT 1) y
      WHERE y.since <= q.limit_at AND y.priority > 0),
    l AS MATERIALIZED (
      SELECT y.id FROM h CROSS JOIN LATERAL (SELECT j.id FROM pgqueue.job j WHERE j.id = h.id AND j.lease = 0 FOR NO KEY UPDATE SKIP LOCKED) y ORDER BY y.id),
    u AS (UPDATE pgqueue.job j SET priority = j.priority - 1, aged_at = clock_timestamp() FROM l WHERE j.id = l.id RETURNING j.key)
    SELECT array_agg(u.key), count(*) INTO ks, n FROM u;
    total := total + n;
    IF ks IS NOT NULL THEN
      PERFORM pgqueue.lane_refresh(array_fill(q.name, ARRAY[cardinality(ks)]), ks);
    END IF;
  END LOOP;
  RETURN total;
END $$;
COMMENT ON FUNCTION pgqueue.age IS 'Move jobs that have waited for their queue''s age_after_s up one priority; returns how many. Called by workers.';

-- A leased row is never locked, its worker is asked instead. A waiting row that somebody has locked is being claimed at this
-- moment: the request reaches whoever claims it.
CREATE FUNCTION pgqueue.cancel(ids bigint[]) RETURNS TABLE (id bigint, state text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  done bigint[]; qs text[]; ks text[];
BEGIN
  WITH l AS MATERIALIZED (
    SELECT j.id FROM pgqueue.job j WHERE j.id = ANY ($1) AND j.lease = 0 ORDER BY j.id FOR UPDATE SKIP LOCKED),
  d AS (DELETE FROM pgqueue.job j USING l WHERE j.id = l.id RETURNING j.*),
  b AS (
    INSERT INTO pgqueue.batch_tally (batch_id, outcome, n)
    SELECT m.batch, 'gone', count(*) FROM (SELECT pgqueue.batch_of(d.headers) AS batch FROM d WHERE d.headers IS NOT NULL) m WHERE m.batch IS NOT NULL GROUP BY m.batch),
  h AS (
    INSERT INTO pgqueue.job_history (id, until, outcome, name, queue, priority, key, attempt, enqueued_at, started_at, headers, payload)
    SELECT d.id, u.until, 'cancelled', d.name, d.queue, d.priority, d.key, d.attempt, d.enqueued_at, nullif(d.claimed_at, '-infinity'), d.headers, d.payload
    FROM d JOIN pgqueue.job_type k ON k.name = d.name CROSS JOIN LATERAL (SELECT pgqueue.history_until(k.keep_s) AS until) u WHERE u.until IS NOT NULL),
  s AS (DELETE FROM pgqueue.job_signal s USING d WHERE s.job_id = d.id),
  a AS (DELETE FROM pgqueue.attempt_log g USING d WHERE g.job_id = d.id),
  t AS (INSERT INTO pgqueue.tally (queue, name, outcome, n) SELECT d.queue, d.name, 'cancelled', count(*) FROM d GROUP BY d.queue, d.name),
  r AS (
    INSERT INTO pgqueue.job_signal (job_id)
    SELECT j.id FROM pgqueue.job j WHERE j.id = ANY ($1) AND NOT EXISTS (SELECT FROM d WHERE d.id = j.id)
    ORDER BY j.id ON CONFLICT DO NOTHING)
  SELECT coalesce(array_agg(d.id), '{}'), array_agg(d.queue) FILTER (WHERE d.key IS NOT NULL), array_agg(d.key) FILTER (WHERE d.key IS NOT NULL)
  INTO done, qs, ks FROM d;
  PERFORM pgqueue.lane_refresh(qs, ks); -- with the name of a job that is gone no worker might take the lane
  RETURN QUERY SELECT c.id, CASE c.state WHEN 'changed' THEN 'cancelled' WHEN 'held' THEN 'requested' ELSE c.state END FROM pgqueue.changes($1, done) c;
END $$;
COMMENT ON FUNCTION pgqueue.cancel IS 'Cancel jobs: cancelled (it waited, and is gone), requested (it runs, its worker is asked), dead or gone.';

-- Schedules. A tick is one time of a schedule; it and its job are written in one transaction, once, whoever looks.
-- next_at says when to look again; the ticks themselves are counted from last_at, the last one that was decided.
CREATE TABLE pgqueue.schedule (
  name       text COLLATE "C" PRIMARY KEY CHECK (btrim(name) <> '' AND octet_length(name) <= 200),
  job        text COLLATE "C" NOT NULL CHECK (btrim(job) <> '' AND octet_length(job) <= 200),
  expr       text NOT NULL CHECK (octet_length(expr) <= 200),
  zone       text NOT NULL,
  payload    json NOT NULL DEFAULT 'null',
  jitter_s   double precision NOT NULL DEFAULT 0 CHECK (jitter_s BETWEEN 0 AND 86400),
  missed     text NOT NULL DEFAULT 'once' CHECK (missed IN ('skip', 'once', 'all')),
  cap        smallint NOT NULL DEFAULT 10 CHECK (cap BETWEEN 1 AND 1000),
  source     text NOT NULL CHECK (source IN ('code', 'operator')),
  paused     boolean NOT NULL DEFAULT false,
  since      timestamptz NOT NULL DEFAULT clock_timestamp(),
  next_at    timestamptz,
  last_at    timestamptz,
  problem    text,
  problem_at timestamptz
) WITH (fillfactor = 50);
COMMENT ON COLUMN pgqueue.schedule.since IS 'Ticks up to here are none of this schedule: it was defined, changed or resumed then.';
COMMENT ON COLUMN pgqueue.schedule.next_at IS 'The next tick; NULL = not worked out yet, a worker does it.';

CREATE TABLE pgqueue.tick (
  schedule text COLLATE "C" NOT NULL,
  tick     timestamptz NOT NULL,
  job_id   bigint,
  fired_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (schedule, tick)
);
COMMENT ON TABLE pgqueue.tick IS 'Ticks that became a job; kept for a day.';

CREATE FUNCTION pgqueue.schedule_add(
  name text, expr text, job text, payload json DEFAULT 'null', zone text DEFAULT 'UTC', jitter interval DEFAULT '0',
  missed text DEFAULT 'once', cap int DEFAULT 10, source text DEFAULT 'operator')
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  fields  int := cardinality(regexp_split_to_array(btrim(schedule_add.expr), '\s+'));
  problem text;
BEGIN
  problem := CASE
    WHEN btrim(coalesce(schedule_add.name, '')) = '' OR octet_length(schedule_add.name) > 200 THEN 'the name is blank or has more than 200 bytes'
    WHEN btrim(coalesce(schedule_add.job, '')) = '' OR octet_length(schedule_add.job) > 200 THEN 'the job name is blank or has more than 200 bytes'
    WHEN schedule_add.expr !~ '^[0-9A-Za-z*/,#[:space:]-]+$' OR fields NOT IN (5, 6) OR octet_length(schedule_add.expr) > 200 OR schedule_add.expr IS NULL
      THEN format('%L is not minute hour day month weekday, with the second in front if you need it', left(schedule_add.expr, 40))
    WHEN schedule_add.missed IS NULL OR schedule_add.missed NOT IN ('skip', 'once', 'all') THEN format('missed is %L, not skip, once or all', schedule_add.missed)
    WHEN schedule_add.cap IS NULL OR schedule_add.cap NOT BETWEEN 1 AND 1000 THEN format('cap is %s, not 1 to 1000', schedule_add.cap)
    WHEN jitter IS NULL OR jitter NOT BETWEEN interval '0' AND interval '1 day' THEN format('jitter is %s, not between 0 and a day', jitter)
    WHEN schedule_add.source = 'operator' AND NOT EXISTS (SELECT FROM pg_catalog.pg_timezone_names z WHERE z.name = schedule_add.zone)
      THEN format('%L is no time zone', schedule_add.zone)
    WHEN schedule_add.source = 'operator' AND EXISTS (SELECT FROM pgqueue.schedule s WHERE s.name = schedule_add.name AND s.source = 'code')
      THEN 'it is defined in code; change it there, or pause it'
  END;
  IF problem IS NOT NULL THEN
    RAISE EXCEPTION USING MESSAGE = format('schedule %L: %s', left(schedule_add.name, 200), problem), ERRCODE = '22023';
  END IF;
  PERFORM schedule_add.payload::jsonb; -- refuses NUL and lone surrogates, which no handler could read
  INSERT INTO pgqueue.schedule AS s (name, job, expr, zone, payload, jitter_s, missed, cap, source)
  VALUES (schedule_add.name, schedule_add.job, schedule_add.expr, schedule_add.zone, coalesce(schedule_add.payload, 'null'),
          extract(epoch FROM jitter), schedule_add.missed, schedule_add.cap, schedule_add.source)
  ON CONFLICT (name) DO UPDATE SET
    job = excluded.job, expr = excluded.expr, zone = excluded.zone, payload = excluded.payload, jitter_s = excluded.jitter_s,
    missed = excluded.missed, cap = excluded.cap, source = excluded.source, problem = NULL, problem_at = NULL,
    since = CASE WHEN (s.expr, s.zone) = (excluded.expr, excluded.zone) THEN s.since ELSE excluded.since END,
    next_at = CASE WHEN (s.expr, s.zone) = (excluded.expr, excluded.zone) THEN s.next_at END
  WHERE (s.job, s.expr, s.zone, s.payload::text, s.jitter_s, s.missed, s.cap, s.source)
    IS DISTINCT FROM (excluded.job, excluded.expr, excluded.zone, excluded.payload::text, excluded.jitter_s, excluded.missed, excluded.cap, excluded.source);
END $$;
COMMENT ON FUNCTION pgqueue.schedule_add IS 'Define a schedule, or change it; another expression or zone starts it anew from now. A worker works out its ticks.';

CREATE FUNCTION pgqueue.schedule_pause(name text, paused boolean DEFAULT true) RETURNS boolean LANGUAGE sql AS $$
  WITH u AS (
    UPDATE pgqueue.schedule s SET paused = schedule_pause.paused,
      since = CASE WHEN s.paused AND NOT schedule_pause.paused THEN clock_timestamp() ELSE s.since END,
      next_at = CASE WHEN s.paused = schedule_pause.paused THEN s.next_at END
    WHERE s.name = schedule_pause.name RETURNING s.name)
  SELECT EXISTS (SELECT FROM u)
$$;
COMMENT ON FUNCTION pgqueue.schedule_pause IS 'Pause a schedule, or resume it with false: what fell due meanwhile does not run. False where there is none of that name.';

CREATE FUNCTION pgqueue.schedule_remove(name text) RETURNS boolean LANGUAGE sql AS $$
  WITH t AS (DELETE FROM pgqueue.tick t WHERE t.schedule = schedule_remove.name),
  d AS (DELETE FROM pgqueue.schedule s WHERE s.name = schedule_remove.name RETURNING s.name)
  SELECT EXISTS (SELECT FROM d)
$$;
COMMENT ON FUNCTION pgqueue.schedule_remove IS 'Remove a schedule; its jobs stay. One that is defined in code comes back when a worker starts.';

-- Whoever computed with a picture of the schedule that has changed since, or that the clock now says is early, writes
-- nothing: no lock is waited for, no error is raised. A schedule's job is never refused or shed by a full queue.
CREATE FUNCTION pgqueue.fire(schedule text, expr text, zone text, expected timestamptz, ticks timestamptz[], through timestamptz, following timestamptz)
RETURNS TABLE (tick timestamptz, job_id bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  s    record;
  at   timestamptz;
  mark text;
  made bigint;
BEGIN
  SELECT c.job, c.payload, c.jitter_s INTO s FROM pgqueue.schedule c
  WHERE c.name = fire.schedule AND c.expr = fire.expr AND c.zone = fire.zone AND NOT c.paused AND c.next_at = expected
    AND greatest(expected, through) <= clock_timestamp()
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  UPDATE pgqueue.schedule c SET next_at = following, last_at = coalesce(through, c.last_at), problem = NULL, problem_at = NULL WHERE c.name = fire.schedule;
  DELETE FROM pgqueue.tick t WHERE t.schedule = fire.schedule AND t.tick < expected - interval '1 day';
  FOREACH at IN ARRAY ticks LOOP
    INSERT INTO pgqueue.tick (schedule, tick) VALUES (fire.schedule, at) ON CONFLICT DO NOTHING;
    CONTINUE WHEN NOT FOUND;
    mark := to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"');
    SELECT m.id INTO made FROM pgqueue.enqueue_many(s.job, json_build_array(s.payload), when_full => 'ignore',
      delay => CASE WHEN s.jitter_s > 0 THEN random() * s.jitter_s * interval '1 s' END,
      idempotency_keys => ARRAY['schedule:' || fire.schedule || ':' || mark],
      headers => json_build_object('schedule', fire.schedule, 'tick', mark)) m;
    UPDATE pgqueue.tick t SET job_id = made WHERE t.schedule = fire.schedule AND t.tick = at;
    RETURN QUERY SELECT at, made;
  END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.fire IS 'Turn due ticks of a schedule into jobs; called by workers.';

-- Long work. Progress and checkpoints of running jobs stand beside the job, never on its hot row.
CREATE TABLE pgqueue.progress (
  job_id   bigint PRIMARY KEY,
  lease    bigint NOT NULL,
  fraction real CHECK (fraction BETWEEN 0 AND 1),
  note     text,
  state    json,
  at       timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);
COMMENT ON COLUMN pgqueue.progress.state IS 'The last checkpoint; the next attempt reads it, also after a replay.';

CREATE FUNCTION pgqueue.checkpoint(job_id bigint, lease bigint, state json) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  -- First the row, then the question, each in a statement of its own: one statement would judge the lease on a snapshot
  -- older than its lock, and a worker that lost the job could write over the checkpoint of its successor.
  INSERT INTO pgqueue.progress (job_id, lease) VALUES ($1, $2) ON CONFLICT DO NOTHING;
  PERFORM FROM pgqueue.progress p WHERE p.job_id = $1 FOR NO KEY UPDATE;
  IF NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.id = $1 AND j.lease = $2) THEN
    RETURN false;
  END IF;
  UPDATE pgqueue.progress p SET lease = $2, state = $3, at = clock_timestamp() WHERE p.job_id = $1;
  RETURN true;
END $$;
COMMENT ON FUNCTION pgqueue.checkpoint IS 'Keep the state of a running job for its next attempt; false where the lease is lost. Called by workers.';

-- What follows a job travels in its headers, under "pgqueue": {"then": [steps], "parent": id, "batch": id}. So it moves along
-- with the job, to the dead letters and back, and goes with it. A step is the arguments of enqueue_many as a JSON object.
CREATE FUNCTION pgqueue.enqueue_step(step json, parent bigint DEFAULT NULL, batch bigint DEFAULT NULL) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE
  mark json;
  head json;
BEGIN
  SELECT json_object_agg(m.k, m.v) FILTER (WHERE m.v IS NOT NULL) INTO mark
  FROM (VALUES ('then', step -> 'then'), ('parent', to_json(parent)), ('batch', to_json(batch))) m(k, v);
  SELECT json_object_agg(h.key, h.value) INTO head
  FROM (SELECT e.key, e.value FROM json_each(step -> 'headers') e UNION ALL SELECT 'pgqueue', mark WHERE mark IS NOT NULL) h;
  RETURN QUERY
    SELECT m.id FROM pgqueue.enqueue_many(
      name => step ->> 'name', payloads => step -> 'payloads', queue => step ->> 'queue', priority => (step ->> 'priority')::int,
      run_at => (step ->> 'run_at')::timestamptz, delay => (step ->> 'delay')::double precision * interval '1 s',
      keys => CASE WHEN json_typeof(step -> 'keys') = 'array' THEN ARRAY(SELECT json_array_elements_text(step -> 'keys')) END,
      idempotency_keys => CASE WHEN json_typeof(step -> 'idempotency_keys') = 'array' THEN ARRAY(SELECT json_array_elements_text(step -> 'idempotency_keys')) END,
      max_attempts => (step ->> 'max_attempts')::int, timeout_s => (step ->> 'timeout_s')::real,
      backoff => CASE WHEN json_typeof(step -> 'backoff') = 'object' THEN step -> 'backoff' END,
      expires_at => (step ->> 'expires_at')::timestamptz, headers => head, when_full => 'ignore',
      else_queue => step ->> 'else_queue', else_priority => (step ->> 'else_priority')::int) m;
END $$;
COMMENT ON FUNCTION pgqueue.enqueue_step IS 'Enqueue the jobs of a step; a full queue takes them, as the work they belong to has begun.';

CREATE FUNCTION pgqueue.batch_of(headers json) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN b.id ~ '^[0-9]{1,18}$' THEN b.id::bigint END FROM (SELECT pgqueue.json_at(headers, '{pgqueue,batch}') AS id) b
$$;
COMMENT ON FUNCTION pgqueue.batch_of IS 'The batch that a job with these headers belongs to; NULL where there is none.';

CREATE TABLE pgqueue.batch (
  id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  size         int NOT NULL CHECK (size >= 0),
  done         int NOT NULL DEFAULT 0,
  gone         int NOT NULL DEFAULT 0,
  completion   json,
  job_id       bigint,
  created_at   timestamptz NOT NULL DEFAULT now(),
  completed_at timestamptz
) WITH (fillfactor = 70);
CREATE INDEX batch_completed ON pgqueue.batch (completed_at) WHERE completed_at IS NOT NULL;
COMMENT ON COLUMN pgqueue.batch.gone IS 'Members that ended without being done: cancelled or discarded.';
COMMENT ON COLUMN pgqueue.batch.job_id IS 'The completion job, once it is enqueued.';

CREATE TABLE pgqueue.batch_tally (
  batch_id bigint NOT NULL,
  outcome  text COLLATE "C" NOT NULL CHECK (outcome IN ('done', 'gone')),
  n        int NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
COMMENT ON TABLE pgqueue.batch_tally IS 'Ends of members, appended in the transaction of the end and folded into batch: members never wait for each other.';

CREATE FUNCTION pgqueue.enqueue_batch(steps json, completion json DEFAULT NULL, when_full text DEFAULT 'raise')
RETURNS TABLE (batch bigint, job bigint, full_queue text) LANGUAGE plpgsql AS $$
DECLARE
  step   json;
  made   bigint;
  total  int;
  follow bigint;
  wait_s int;
BEGIN
  -- A batch is let in as a whole, or not at all.
  SELECT q.name, pgqueue.queue_full(q.name) INTO full_queue, wait_s
  FROM (SELECT DISTINCT coalesce(e.value ->> 'queue', t.queue, CASE WHEN t.name IS NULL THEN e.value ->> 'else_queue' END, 'default') AS name
        FROM json_array_elements(steps) e LEFT JOIN pgqueue.job_type t ON t.name = e.value ->> 'name') q
  WHERE when_full <> 'ignore' AND pgqueue.queue_full(q.name) IS NOT NULL LIMIT 1;
  IF wait_s IS NOT NULL AND when_full = 'tell' THEN
    RETURN QUERY SELECT -wait_s::bigint, NULL::bigint, full_queue;
    RETURN;
  ELSIF wait_s IS NOT NULL THEN
    RAISE EXCEPTION 'queue % is full; try again in % s', full_queue, wait_s
      USING ERRCODE = '53400', HINT = 'The limits are in pgqueue.queue: max_depth, max_age_s.';
  END IF;
  SELECT coalesce(sum(json_array_length(e.value -> 'payloads')), 0) INTO total FROM json_array_elements(steps) e;
  IF total = 0 AND completion IS NOT NULL THEN
    SELECT * INTO follow FROM pgqueue.enqueue_step(completion);
  END IF;
  INSERT INTO pgqueue.batch AS b (size, completion, job_id, completed_at)
  VALUES (total, completion, follow, CASE WHEN total = 0 THEN now() END) RETURNING b.id INTO made;
  RETURN QUERY SELECT made, NULL::bigint, NULL;
  FOR step IN SELECT e.value FROM json_array_elements(steps) e LOOP
    RETURN QUERY SELECT made, s.*, NULL FROM pgqueue.enqueue_step(step, NULL, made) s;
  END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.enqueue_batch IS 'Enqueue jobs together; completion runs when all of them are done. The first row names the batch, the others its '
  'jobs. Where a queue of theirs is full: when_full raise: SQLSTATE 53400; tell: one row with the negative of the seconds to wait; ignore: enqueue.';

-- Folders take batches in the order of their ids and wait for each other, so whoever folds last sees every member.
CREATE FUNCTION pgqueue.fold_batches() RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE
  bid    bigint;
  b      record;
  follow bigint;
BEGIN
  FOR bid IN SELECT DISTINCT t.batch_id FROM pgqueue.batch_tally t ORDER BY t.batch_id LIMIT 1000 LOOP
    PERFORM FROM pgqueue.batch x WHERE x.id = bid FOR NO KEY UPDATE;
    WITH d AS (DELETE FROM pgqueue.batch_tally t WHERE t.batch_id = bid RETURNING t.outcome, t.n)
    UPDATE pgqueue.batch x SET done = x.done + s.done, gone = x.gone + s.gone
    FROM (SELECT coalesce(sum(d.n) FILTER (WHERE d.outcome = 'done'), 0) AS done, coalesce(sum(d.n) FILTER (WHERE d.outcome = 'gone'), 0) AS gone FROM d) s
    WHERE x.id = bid RETURNING x.* INTO b;
    CONTINUE WHEN NOT FOUND OR b.completed_at IS NOT NULL OR b.done + b.gone < b.size;
    follow := NULL;
    IF b.completion IS NOT NULL THEN
      SELECT * INTO follow FROM pgqueue.enqueue_step(b.completion, NULL, NULL);
    END IF;
    UPDATE pgqueue.batch x SET completed_at = clock_timestamp(), job_id = follow WHERE x.id = bid;
    RETURN NEXT bid;
  END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.fold_batches IS 'Count the members that ended and enqueue the completion jobs of whole batches; returns these. Called by workers.';

CREATE FUNCTION pgqueue.discard(ids bigint[]) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  queues text[];
  keys   text[];
BEGIN
  SELECT array_agg(b.queue), array_agg(b.key) INTO queues, keys
  FROM (SELECT DISTINCT d.queue, d.key FROM pgqueue.dead_job d WHERE d.id = ANY (discard.ids) AND d.blocks) b;
  RETURN QUERY WITH page AS MATERIALIZED (
    SELECT d.id FROM pgqueue.dead_job d WHERE d.id = ANY (discard.ids) ORDER BY d.id FOR UPDATE SKIP LOCKED),
  gone AS (
    DELETE FROM pgqueue.dead_job d USING page WHERE d.id = page.id RETURNING d.id, d.queue, d.name, d.headers),
  members AS (
    INSERT INTO pgqueue.batch_tally (batch_id, outcome, n)
    SELECT m.batch, 'gone', count(*) FROM (SELECT pgqueue.batch_of(g.headers) AS batch FROM gone g WHERE g.headers IS NOT NULL) m WHERE m.batch IS NOT NULL GROUP BY m.batch),
  counted AS (
    INSERT INTO pgqueue.tally (queue, name, outcome, n)
    SELECT g.queue, g.name, 'discarded', count(*) FROM gone g GROUP BY g.queue, g.name)
  SELECT g.id FROM gone g ORDER BY g.id;
  PERFORM pgqueue.lane_unblock(queues, keys);
END $$;
COMMENT ON FUNCTION pgqueue.discard IS 'Throw dead letters away for good; returns the ids that were there.';

-- History. Each type keeps its finished jobs for a time of its own, so rows lie in the partition of the day on which they go.
CREATE TABLE pgqueue.job_history (
  id          bigint NOT NULL,
  until       timestamptz NOT NULL,
  outcome     text COLLATE "C" NOT NULL CHECK (outcome IN ('done', 'cancelled')),
  name        text COLLATE "C" NOT NULL,
  queue       text COLLATE "C" NOT NULL,
  priority    smallint NOT NULL,
  key         text COLLATE "C",
  attempt     smallint NOT NULL,
  enqueued_at timestamptz NOT NULL,
  started_at  timestamptz,
  finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  worker      text,
  headers     json,
  payload     json NOT NULL,
  result      json,
  problem     text
) PARTITION BY RANGE (until);
CREATE INDEX job_history_id ON pgqueue.job_history (id);
CREATE INDEX job_history_finished ON pgqueue.job_history USING brin (finished_at);
COMMENT ON TABLE pgqueue.job_history IS 'Finished jobs of the types that keep them (job_type.keep_s), until their time is over.';
COMMENT ON COLUMN pgqueue.job_history.problem IS 'Why there is no result, where the handler returned one that could not be kept.';

CREATE TABLE pgqueue.history_day (day date PRIMARY KEY);
COMMENT ON TABLE pgqueue.history_day IS 'The partitions that job_history has, by the day (UTC) on which their rows go.';

CREATE FUNCTION pgqueue.history_until(keep_s double precision) RETURNS timestamptz LANGUAGE sql AS $$
  -- Where the partition is missing, the next later one is taken, else the last: an acknowledgement never fails for want of one.
  SELECT CASE WHEN d.day = w.day THEN w.at ELSE d.day::timestamp AT TIME ZONE 'UTC' END
  FROM (SELECT x.at, (x.at AT TIME ZONE 'UTC')::date AS day FROM (SELECT clock_timestamp() + keep_s * interval '1 s' AS at) x) w
  CROSS JOIN LATERAL (SELECT h.day FROM pgqueue.history_day h ORDER BY h.day < w.day, abs(h.day - w.day) LIMIT 1) d
  WHERE keep_s IS NOT NULL
$$;
COMMENT ON FUNCTION pgqueue.history_until IS 'Until when a job that ends now is kept; NULL where it is not, or there is no partition at all.';

-- A worker owns no table, so the function works with the rights of the one who does. It takes no argument: all it does
-- follows from job_type and the clock.
CREATE FUNCTION pgqueue.history_days() RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  d    date;
  leaf text;
  n    int := 0;
BEGIN
  IF NOT EXISTS (SELECT FROM pgqueue.job_type t WHERE t.keep_s IS NOT NULL) AND NOT EXISTS (SELECT FROM pgqueue.history_day h) THEN
    RETURN 0;
  END IF;
  PERFORM pg_advisory_xact_lock(1885827445, hashtext('history'));
  FOR d IN
    SELECT ((clock_timestamp() + t.keep_s * interval '1 s') AT TIME ZONE 'UTC')::date + a
    FROM pgqueue.job_type t CROSS JOIN generate_series(0, 2) a WHERE t.keep_s IS NOT NULL
    EXCEPT SELECT h.day FROM pgqueue.history_day h ORDER BY 1
  LOOP
    -- Attached, not created in place: that takes a lock which lets reads and writes of the table go on.
    leaf := 'job_history_' || to_char(d, 'YYYYMMDD');
    EXECUTE format('CREATE TABLE pgqueue.%I (LIKE pgqueue.job_history INCLUDING ALL)', leaf);
    EXECUTE format('ALTER TABLE pgqueue.job_history ATTACH PARTITION pgqueue.%I FOR VALUES FROM (%L) TO (%L)',
                   leaf, d || ' 00:00:00+00', d + 1 || ' 00:00:00+00');
    INSERT INTO pgqueue.history_day VALUES (d);
    n := n + 1;
  END LOOP;
  FOR d IN SELECT h.day FROM pgqueue.history_day h WHERE h.day < (clock_timestamp() AT TIME ZONE 'UTC')::date ORDER BY 1 LIMIT 4 LOOP
    leaf := 'job_history_' || to_char(d, 'YYYYMMDD');
    BEGIN
      EXECUTE format('LOCK TABLE pgqueue.%I IN ACCESS EXCLUSIVE MODE NOWAIT', leaf);
      EXECUTE format('TRUNCATE pgqueue.%I', leaf);
    EXCEPTION WHEN lock_not_available THEN
      EXIT; -- somebody reads it: the next turn tries again, and nobody has queued behind this one
    END;
    BEGIN
      LOCK TABLE ONLY pgqueue.job_history IN ACCESS EXCLUSIVE MODE NOWAIT;
      EXECUTE format('DROP TABLE pgqueue.%I', leaf);
      DELETE FROM pgqueue.history_day h WHERE h.day = d;
      n := n + 1;
    EXCEPTION WHEN lock_not_available THEN
      EXIT; -- empty at least
    END;
  END LOOP;
  RETURN n;
END $$;
COMMENT ON FUNCTION pgqueue.history_days IS 'Make the partitions of the next days and drop those whose day is over, waiting for nobody; returns how many. Called by workers.';

-- The end of a job that has more to write than its acknowledgement: what follows it, its batch, its history, its result. One
-- transaction, fenced by lease; rows that somebody else has locked are passed, or with wait waited for.
CREATE FUNCTION pgqueue.complete(jobs json, wait boolean DEFAULT false) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  r     record;
  steps json;
BEGIN
  IF complete.wait THEN
    PERFORM FROM pgqueue.job j JOIN json_to_recordset(complete.jobs) x(id bigint, lease bigint) ON j.id = x.id AND j.lease = x.lease FOR UPDATE OF j;
    -- A key that another job has taken meanwhile is as good as a lost lease: see seal in ledger.sql.
    PERFORM FROM pgqueue.effect e JOIN pgqueue.job j ON e.name = j.name AND e.key = j.idempotency_key
    JOIN json_to_recordset(complete.jobs) x(id bigint) ON j.id = x.id WHERE e.job_id = j.id AND e.applied_at IS NULL FOR UPDATE OF e;
    IF NOT FOUND AND EXISTS (SELECT FROM pgqueue.job j JOIN json_to_recordset(complete.jobs) x(id bigint) ON j.id = x.id WHERE j.idempotency_key IS NOT NULL) THEN
      RETURN;
    END IF;
  END IF;
  FOR r IN
    WITH l AS MATERIALIZED (
      SELECT x.* FROM json_to_recordset(complete.jobs) x(id bigint, lease bigint, result json, problem text, steps json)
      CROSS JOIN LATERAL (SELECT j.id FROM pgqueue.job j WHERE j.id = x.id AND j.lease = x.lease FOR UPDATE SKIP LOCKED) j ORDER BY x.id),
    d AS (
      DELETE FROM pgqueue.job j USING l WHERE j.id = l.id
      RETURNING j.*, l.result, l.problem, l.steps, nullif(j.claimed_at, '-infinity') - greatest(j.enqueued_at, j.ready_at) AS wait),
    e AS (
      UPDATE pgqueue.effect e SET applied_at = clock_timestamp() FROM d
      WHERE e.name = d.name AND e.key = d.idempotency_key AND e.job_id = d.id AND e.lease = d.lease AND e.applied_at IS NULL),
    t AS (
      INSERT INTO pgqueue.tally (queue, name, outcome, n, wait_s)
      SELECT d.queue, d.name, 'ok', count(*), coalesce(extract(epoch FROM sum(d.wait)), 0) FROM d GROUP BY d.queue, d.name),
    p AS (DELETE FROM pgqueue.progress p USING d WHERE p.job_id = d.id),
    b AS (
      INSERT INTO pgqueue.batch_tally (batch_id, outcome, n)
      SELECT m.batch, 'done', count(*) FROM (SELECT pgqueue.batch_of(d.headers) AS batch FROM d WHERE d.headers IS NOT NULL) m WHERE m.batch IS NOT NULL GROUP BY m.batch),
    h AS (
      INSERT INTO pgqueue.job_history (id, until, outcome, name, queue, priority, key, attempt, enqueued_at, started_at, worker, headers, payload, result, problem)
      SELECT d.id, u.until, 'done', d.name, d.queue, d.priority, d.key, d.attempt, d.enqueued_at, d.claimed_at,
             (SELECT w.host || ':' || w.pid FROM pgqueue.worker w WHERE w.nonce = d.lease >> 32), d.headers, d.payload, d.result, d.problem
      FROM d JOIN pgqueue.job_type k ON k.name = d.name CROSS JOIN LATERAL (SELECT pgqueue.history_until(k.keep_s) AS until) u WHERE u.until IS NOT NULL)
    SELECT d.id, d.steps, CASE WHEN d.headers IS NOT NULL THEN pgqueue.json_at(d.headers, '{pgqueue,then}')::json END AS follow FROM d ORDER BY d.id
  LOOP
    FOREACH steps IN ARRAY ARRAY[r.follow, r.steps] LOOP
      CONTINUE WHEN json_typeof(steps) IS DISTINCT FROM 'array';
      PERFORM pgqueue.enqueue_step(s.value, r.id) FROM json_array_elements(steps) s;
    END LOOP;
    RETURN NEXT r.id;
  END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.complete IS 'Acknowledge jobs that have more to write than that; returns the ids done. Called by workers.';

CREATE FUNCTION pgqueue.status(id bigint)
RETURNS TABLE (state text, name text, queue text, attempt int, max_attempts int, enqueued_at timestamptz, run_at timestamptz, started_at timestamptz,
               finished_at timestamptz, fraction real, note text, result json, problem text, error_type text, error text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT pgqueue.job_state(j.id), j.name, j.queue, j.attempt::int, coalesce(j.max_attempts, t.max_attempts)::int, j.enqueued_at, j.run_at,
         CASE WHEN j.lease <> 0 THEN j.claimed_at END, NULL::timestamptz, p.fraction, p.note, NULL::json, NULL::text, NULL::text, NULL::text
  FROM pgqueue.job j LEFT JOIN pgqueue.job_type t ON t.name = j.name LEFT JOIN pgqueue.progress p ON p.job_id = j.id WHERE j.id = status.id
  UNION ALL
  SELECT 'dead', d.name, d.queue, d.attempt, coalesce(d.max_attempts, t.max_attempts), d.enqueued_at, NULL, d.last_attempt_at,
         d.died_at, p.fraction, p.note, NULL, NULL, d.error_type, d.error
  FROM pgqueue.dead_job d LEFT JOIN pgqueue.job_type t ON t.name = d.name LEFT JOIN pgqueue.progress p ON p.job_id = d.id WHERE d.id = status.id
  UNION ALL
  SELECT h.outcome, h.name, h.queue, h.attempt, NULL, h.enqueued_at, NULL, h.started_at, h.finished_at, NULL, NULL, h.result, h.problem, NULL, NULL
  FROM pgqueue.job_history h WHERE h.id = status.id
$$;
COMMENT ON FUNCTION pgqueue.status IS 'State of a job by its id: ready, delayed, blocked, in_flight, dead, and of types that keep their jobs done or cancelled.';
REVOKE ALL ON FUNCTION pgqueue.status FROM PUBLIC;

-- Outbox, relay, inbox.
CREATE TABLE pgqueue.outbox (
  id                bigserial PRIMARY KEY,
  aggregate_id      text COLLATE "C",
  event_type        text NOT NULL CHECK (btrim(event_type) <> ''),
  payload           jsonb NOT NULL,
  created_at        timestamptz NOT NULL DEFAULT now(),
  published_at      timestamptz,
  aggregate_type    text,
  aggregate_version bigint,
  headers           jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(headers) = 'object'),
  attempts          smallint NOT NULL DEFAULT 0,
  next_attempt_at   timestamptz,
  last_error        text,
  parked_at         timestamptz,
  part              smallint NOT NULL GENERATED ALWAYS AS
    ((hashtextextended(coalesce(aggregate_id, id::text), 0) & 2147483647) % 64) STORED,
  CONSTRAINT outbox_trouble_has_a_reason CHECK (last_error IS NOT NULL OR (parked_at IS NULL AND next_attempt_at IS NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.2);
CREATE INDEX outbox_pending ON pgqueue.outbox (part, id) WHERE published_at IS NULL AND parked_at IS NULL;
CREATE INDEX outbox_trouble ON pgqueue.outbox (part, id)
  WHERE published_at IS NULL AND last_error IS NOT NULL AND (parked_at IS NULL OR next_attempt_at IS NOT NULL);
CREATE INDEX outbox_parked ON pgqueue.outbox (id) WHERE parked_at IS NOT NULL AND published_at IS NULL;
COMMENT ON COLUMN pgqueue.outbox.next_attempt_at IS 'In the future: the whole aggregate waits.';
COMMENT ON COLUMN pgqueue.outbox.parked_at IS 'Set: this row is not read.';
COMMENT ON COLUMN pgqueue.outbox.attempts IS 'Rejections by the broker; a broker that is away spends none.';

CREATE TABLE pgqueue.relay (
  id          uuid PRIMARY KEY,
  name        text NOT NULL,
  started_at  timestamptz NOT NULL DEFAULT now(),
  lease_until timestamptz NOT NULL
) WITH (fillfactor = 50);
CREATE TABLE pgqueue.relay_partition (part smallint PRIMARY KEY, owner uuid) WITH (fillfactor = 50);
INSERT INTO pgqueue.relay_partition (part) SELECT generate_series(0, 63);
COMMENT ON TABLE pgqueue.relay_partition IS 'Who publishes which partition: the only authority. Its row count is the partition count.';

CREATE TABLE pgqueue.inbox (
  consumer   text COLLATE "C" NOT NULL,
  source     text COLLATE "C" NOT NULL,
  key        text COLLATE "C" NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (consumer, source, key)
);
CREATE INDEX inbox_applied ON pgqueue.inbox USING brin (applied_at) WITH (pages_per_range = 16, autosummarize = on);
CREATE TABLE pgqueue.inbox_version (
  consumer     text COLLATE "C" NOT NULL,
  source       text COLLATE "C" NOT NULL,
  aggregate_id text COLLATE "C" NOT NULL,
  version      bigint NOT NULL,
  PRIMARY KEY (consumer, source, aggregate_id)
) WITH (fillfactor = 70);

CREATE SEQUENCE pgqueue.outbox_idle MINVALUE 0 START 0;
GRANT SELECT ON SEQUENCE pgqueue.outbox_idle TO PUBLIC;
CREATE FUNCTION pgqueue.outbox_wake() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF pg_catalog.pg_sequence_last_value('pgqueue.outbox_idle'::pg_catalog.regclass) > extract(epoch FROM pg_catalog.clock_timestamp()) * 1000
     AND pg_catalog.current_setting('pgqueue.notify', true) IS DISTINCT FROM 'off' THEN
    PERFORM pg_catalog.pg_notify('pgqueue_outbox', '');
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER outbox_wake AFTER INSERT ON pgqueue.outbox FOR EACH ROW EXECUTE FUNCTION pgqueue.outbox_wake();

CREATE FUNCTION pgqueue.outbox_add_ordered(
  aggregate_id text, event_type text, payload jsonb, aggregate_type text DEFAULT NULL, aggregate_version bigint DEFAULT NULL,
  headers jsonb DEFAULT '{}')
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  made bigint;
BEGIN
  IF $1 IS NULL THEN
    RAISE EXCEPTION 'pgqueue.outbox_add_ordered: there is no aggregate_id, so there is no order' USING ERRCODE = '22023';
  END IF;
  -- First the lock, then the number: ids of one aggregate rise in the order of the commits.
  PERFORM pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended($1, 0));
  INSERT INTO pgqueue.outbox AS o (aggregate_id, event_type, payload, aggregate_type, aggregate_version, headers)
  VALUES ($1, $2, $3, $4, $5, coalesce($6, '{}')) RETURNING o.id INTO made;
  RETURN made;
END $$;
COMMENT ON FUNCTION pgqueue.outbox_add_ordered IS 'Write an event after all earlier transactions that wrote one of its aggregate this way; for writers that lock nothing else.';

CREATE TABLE pgqueue.outbox_replay (
  id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  event_type   text,
  aggregate_id text COLLATE "C",
  since        timestamptz,
  until        timestamptz,
  done_to      bigint NOT NULL DEFAULT 0,
  upto         bigint NOT NULL,
  copied       bigint NOT NULL DEFAULT 0,
  started_at   timestamptz NOT NULL DEFAULT now(),
  ended_at     timestamptz
);
CREATE UNIQUE INDEX outbox_replay_open ON pgqueue.outbox_replay ((coalesce(event_type, '')), (coalesce(aggregate_id, ''))) WHERE ended_at IS NULL;
COMMENT ON TABLE pgqueue.outbox_replay IS 'Replays of published events: what was asked for, and up to which id it is copied.';

-- Views: the documented way to look in. They run with the owner's rights, so a reader needs no table.
CREATE VIEW pgqueue.queue_depth AS
WITH s AS (
  SELECT j.queue,
    CASE WHEN j.lease <> 0 AND j.deadline > now() THEN 'in_flight'
         WHEN j.run_at > now() THEN 'delayed'
         WHEN j.key IS NOT NULL AND j.run_at IS NULL
           AND row_number() OVER (PARTITION BY j.queue, j.key, j.run_at IS NULL ORDER BY j.id) > coalesce(t.slots, 1) THEN 'blocked'
         WHEN l.lease = 0 AND l.deadline > now() AND l.deadline < 'infinity' THEN 'delayed'
         WHEN q.paused OR t.paused OR l.deadline = 'infinity' THEN 'blocked'
         ELSE 'ready' END AS state,
    greatest(j.enqueued_at, j.ready_at, j.run_at, j.deadline, CASE WHEN l.lease = 0 THEN l.deadline END) AS ready_since
  FROM pgqueue.job j
  LEFT JOIN pgqueue.queue q ON q.name = j.queue
  LEFT JOIN pgqueue.job_type t ON t.name = j.name
  LEFT JOIN pgqueue.lane l ON j.key IS NOT NULL AND j.run_at IS NULL AND l.queue = j.queue AND l.key = j.key AND l.slot = 0)
SELECT queue, count(*) FILTER (WHERE state = 'ready') AS ready, count(*) FILTER (WHERE state = 'delayed') AS delayed,
       count(*) FILTER (WHERE state = 'in_flight') AS in_flight, count(*) FILTER (WHERE state = 'blocked') AS blocked,
       coalesce(extract(epoch FROM now() - min(ready_since) FILTER (WHERE state = 'ready')), 0)::double precision AS oldest_ready_s
FROM s GROUP BY queue;
COMMENT ON VIEW pgqueue.queue_depth IS 'Exact depth of each queue that has jobs, by state; reads the live table (up to a second per million rows).';

CREATE VIEW pgqueue.queue_gauge AS
SELECT d.queue, d.ready, d.delayed, d.in_flight, d.blocked, d.oldest_ready_s, d.capped,
       extract(epoch FROM now() - d.at)::double precision AS sampled_s_ago
FROM pgqueue.depth_sample d;
COMMENT ON VIEW pgqueue.queue_gauge IS 'Depth as sampled by one worker every few seconds: one row a queue, for machines.';

CREATE VIEW pgqueue.dead_by_error AS
SELECT d.error_type, d.reason, count(*) AS jobs, count(*) FILTER (WHERE d.died_at > now() - interval '10 min') AS last_10_min,
       min(d.died_at) AS first_seen, max(d.died_at) AS last_seen,
       array_agg(DISTINCT d.queue) AS queues, array_agg(DISTINCT d.name) AS names
FROM pgqueue.dead_job d GROUP BY d.error_type, d.reason;

CREATE VIEW pgqueue.dead_rate AS
SELECT d.queue, d.error_type, count(*) AS jobs, min(d.died_at) AS first_seen, max(d.died_at) AS last_seen
FROM pgqueue.dead_job d WHERE d.died_at > now() - interval '10 min' GROUP BY d.queue, d.error_type;
COMMENT ON VIEW pgqueue.dead_rate IS 'New dead letters of the last 10 minutes by queue and error: the number to alert on.';

CREATE VIEW pgqueue.workers AS
SELECT w.nonce, w.host, w.pid, w.version, w.queues, w.names, w.concurrency, w.in_flight, w.draining, w.started_at, w.beat_at,
       w.beat_at > now() - interval '30 s' AS alive
FROM pgqueue.worker w;

CREATE VIEW pgqueue.schedule_status AS
SELECT s.name, s.job, s.expr, s.zone, s.source, s.missed, s.jitter_s,
       CASE WHEN s.paused THEN 'paused'
            WHEN s.source = 'code' AND NOT EXISTS (SELECT FROM pgqueue.worker w WHERE w.beat_at > now() - interval '30 s' AND s.name = ANY (w.schedules))
              AND EXISTS (SELECT FROM pgqueue.worker w WHERE w.beat_at > now() - interval '30 s' AND s.job = ANY (w.names)) THEN 'orphan'
            WHEN s.problem IS NOT NULL THEN 'broken'
            ELSE 'active' END AS state,
       s.next_at, s.last_at, greatest(extract(epoch FROM now() - s.next_at), 0)::double precision AS late_s, s.problem
FROM pgqueue.schedule s;
COMMENT ON VIEW pgqueue.schedule_status IS 'Schedules. orphan: defined in code, but no running worker that has its job defines it any more; it rests.';

CREATE VIEW pgqueue.batch_status AS
SELECT b.id, b.size, b.done, b.gone, b.size - b.done - b.gone AS unfinished, b.created_at, b.completed_at, b.job_id
FROM pgqueue.batch b;
COMMENT ON VIEW pgqueue.batch_status IS 'Batches: members in all, done, gone (cancelled or discarded), unfinished; the completion job once it is enqueued.';

CREATE VIEW pgqueue.outbox_lag AS
SELECT count(*) FILTER (WHERE o.parked_at IS NULL) AS pending, count(*) FILTER (WHERE o.parked_at IS NOT NULL) AS parked,
       count(*) FILTER (WHERE o.next_attempt_at > now()) AS blocked_aggregates,
       -- A writer may give any time, an infinite one too, from which no other can be subtracted.
       coalesce(extract(epoch FROM now() - least(now(), min(greatest(o.created_at, '1000-01-01')) FILTER (WHERE o.parked_at IS NULL))), 0)::double precision AS oldest_pending_s,
       (SELECT count(*) FROM pgqueue.relay r WHERE r.lease_until > now()) AS relays,
       (SELECT count(*) FROM pgqueue.relay_partition p WHERE NOT EXISTS
          (SELECT FROM pgqueue.relay r WHERE r.id = p.owner AND r.lease_until > now())) AS orphan_partitions
FROM (
  -- Two halves, each with a partial index of its own: one condition for both would read the published rows too.
  SELECT w.created_at, w.parked_at, w.next_attempt_at FROM pgqueue.outbox w WHERE w.published_at IS NULL AND w.parked_at IS NULL
  UNION ALL
  SELECT p.created_at, p.parked_at, p.next_attempt_at FROM pgqueue.outbox p WHERE p.published_at IS NULL AND p.parked_at IS NOT NULL) o;

-- Rights by role: producer, worker, relay, reader. Called by the owner: SELECT pgqueue.grant_role('producer', 'shop').
CREATE FUNCTION pgqueue.grant_role(kind text, role name) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  line text;
  lines text[];
BEGIN
  lines := CASE kind
    WHEN 'producer' THEN ARRAY[
      'INSERT, SELECT (id) ON pgqueue.job', 'SELECT ON pgqueue.job_type', 'SELECT, INSERT, UPDATE ON pgqueue.dedup',
      'USAGE ON SEQUENCE pgqueue.pos_seq', 'USAGE ON SEQUENCE pgqueue.job_id_seq', 'INSERT, SELECT (id) ON pgqueue.outbox',
      'USAGE ON SEQUENCE pgqueue.outbox_id_seq', 'SELECT, INSERT ON pgqueue.inbox', 'SELECT, INSERT, UPDATE ON pgqueue.inbox_version',
      'SELECT ON pgqueue.depth_sample', 'SELECT ON pgqueue.queue', 'INSERT ON pgqueue.tally', 'INSERT, SELECT (id) ON pgqueue.batch',
      'SELECT ON pgqueue.batch_status', 'EXECUTE ON FUNCTION pgqueue.status', 'EXECUTE ON FUNCTION pgqueue.dedup_change']
    WHEN 'worker' THEN ARRAY[
      'SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgqueue', 'USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA pgqueue',
      'EXECUTE ON FUNCTION pgqueue.status', 'EXECUTE ON FUNCTION pgqueue.dedup_change']
    WHEN 'relay' THEN ARRAY[
      'SELECT, INSERT, UPDATE, DELETE ON pgqueue.outbox', 'SELECT, INSERT, UPDATE, DELETE ON pgqueue.relay',
      'SELECT, INSERT, UPDATE ON pgqueue.outbox_replay', 'SELECT, UPDATE ON pgqueue.relay_partition', 'SELECT, DELETE ON pgqueue.inbox', 'USAGE, SELECT ON SEQUENCE pgqueue.outbox_id_seq',
      'USAGE, SELECT, UPDATE ON SEQUENCE pgqueue.outbox_idle', 'SELECT ON pgqueue.outbox_lag', 'SELECT ON pgqueue.alembic_version',
      'INSERT, SELECT (id) ON pgqueue.job', 'SELECT ON pgqueue.job_type', 'SELECT, INSERT, UPDATE ON pgqueue.dedup',
      'USAGE ON SEQUENCE pgqueue.pos_seq', 'USAGE ON SEQUENCE pgqueue.job_id_seq', 'SELECT ON pgqueue.depth_sample', 'SELECT ON pgqueue.queue',
      'INSERT ON pgqueue.tally']
    WHEN 'reader' THEN ARRAY[
      'SELECT ON pgqueue.queue_depth', 'SELECT ON pgqueue.queue_gauge', 'SELECT ON pgqueue.dead_by_error', 'SELECT ON pgqueue.dead_rate', 'SELECT ON pgqueue.workers',
      'SELECT ON pgqueue.outbox_lag', 'SELECT ON pgqueue.schedule_status', 'SELECT ON pgqueue.batch_status', 'EXECUTE ON FUNCTION pgqueue.status', 'SELECT ON pgqueue.tally_minute', 'SELECT ON pgqueue.alembic_version']
  END;
  IF lines IS NULL THEN
    RAISE EXCEPTION 'kind of role is %, not producer, worker, relay or reader', kind USING ERRCODE = '22023';
  END IF;
  EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA pgqueue TO %I', role);
  FOREACH line IN ARRAY lines LOOP
    EXECUTE pg_catalog.format('GRANT %s TO %I', line, role);
  END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.grant_role IS 'Grant a database role the rights of a producer, worker, relay or reader.';
