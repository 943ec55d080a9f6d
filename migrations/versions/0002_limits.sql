-- What revision 0002 adds. Each section stands by itself; 0002_limits.down.sql takes the sections back in
-- reverse order. It only adds, so that workers of the previous release go on meanwhile (see the end).

-- Prune ---------------------------------------------------------------------------------------------------

-- Windows that have passed, oldest first: without it each prune reads all open windows.
CREATE INDEX dedup_until ON pgqueue.dedup (until) WHERE until IS NOT NULL;

-- Limits --------------------------------------------------------------------------------------------------

-- A limit per key, a rate per key: the jobs of a type that have the same key, so many at once, in no promised order. Such
-- a key is a lane with as many slots, named '@name@key', which no other type shares.
ALTER TABLE pgqueue.job_type
  ADD COLUMN key_slots smallint CHECK (key_slots > 0),
  ADD COLUMN key_rate_per_s double precision CHECK (key_rate_per_s > 0),
  ADD COLUMN limits_set boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN pgqueue.job_type.limits_set IS 'The limits were set while jobs run; what the code declares does not change them.';

CREATE FUNCTION pgqueue.is_limit(key text, name text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
  SELECT starts_with($1 || '@', '@' || $2 || '@')
$$;
COMMENT ON FUNCTION pgqueue.is_limit IS 'Whether this key of a job of this name is a limit, of the name or of a key, and no ordering key.';

CREATE FUNCTION pgqueue.limit_key(name text, key text, slots int, key_slots int) RETURNS text LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE
    WHEN $3 IS NOT NULL THEN '@' || $1
    WHEN $2 = '@' || $1 THEN NULL
    WHEN $4 IS NULL THEN CASE WHEN pgqueue.is_limit($2, $1) THEN substr($2, length($1) + 3) ELSE $2 END
    WHEN pgqueue.is_limit($2, $1) THEN $2
    ELSE '@' || $1 || '@' || CASE WHEN octet_length($1) + octet_length($2) > 510
      THEN encode(sha256(convert_to($2, 'UTF8')), 'hex') ELSE $2 END END
$$;
COMMENT ON FUNCTION pgqueue.limit_key IS 'The key that a job of this name has under these limits, whatever limits its key is from; NULL: it has none.';

CREATE FUNCTION pgqueue.job_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  NEW.key := coalesce((SELECT pgqueue.limit_key(NEW.name, NEW.key, NULL, t.key_slots) FROM pgqueue.job_type t WHERE t.name = NEW.name AND t.key_slots IS NOT NULL), NEW.key);
  RETURN NEW;
END $$;
CREATE TRIGGER job_key BEFORE INSERT ON pgqueue.job FOR EACH ROW
  WHEN (NEW.key IS NOT NULL AND NOT starts_with(NEW.key || '@', '@' || NEW.name || '@')) EXECUTE FUNCTION pgqueue.job_key();

-- A limit per queue: what runs has a permit; a rate per queue: a GCRA row, tat being the time at which the last granted
-- job would begin at an even pace. Nobody but the workers of a queue that has one looks at either.
ALTER TABLE pgqueue.queue
  ADD COLUMN slots int CHECK (slots > 0),
  ADD CONSTRAINT queue_rate CHECK (rate_per_s > 0), ADD CONSTRAINT queue_burst CHECK (burst >= 1);
COMMENT ON COLUMN pgqueue.queue.slots IS 'How many of its jobs run at once over all workers; NULL = no limit.';

CREATE TABLE pgqueue.permit (
  queue  text COLLATE "C" NOT NULL,
  job_id bigint NOT NULL,
  PRIMARY KEY (queue, job_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
COMMENT ON TABLE pgqueue.permit IS 'Jobs that run in a queue with a limit. A permit is good as long as its job is leased; it ends with the lease, so an acknowledgement need not know of it.';

-- The claim of a queue with a limit or a rate, one worker at a time: gate tells how many jobs may begin, gate_pass says
-- which did, in the same transaction. A permit of a job that lost its worker stays until the job is claimed again, which
-- needs no gate then - or for a minute, if nobody wants the job.
CREATE FUNCTION pgqueue.gate(queue text, want int) RETURNS TABLE (n int, wait double precision) LANGUAGE plpgsql AS $$
DECLARE
  s record; ahead double precision;
BEGIN
  SELECT q.slots, q.rate_per_s, coalesce(q.burst, greatest(1, q.rate_per_s)) AS burst, q.tat INTO s
  FROM pgqueue.queue q WHERE q.name = gate.queue FOR NO KEY UPDATE SKIP LOCKED;
  n := want; wait := 0;
  IF NOT FOUND THEN -- somebody is at the gate
    n := CASE WHEN EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = gate.queue) THEN 0 ELSE want END;
  END IF;
  IF s.slots IS NOT NULL THEN
    -- Jobs are looked up one by one: a join, or a NOT EXISTS without OFFSET, may read the index of all jobs.
    -- A job with a key that lost its worker comes through the gate again: end its lease, or a late heartbeat would revive it.
    WITH g AS MATERIALIZED (
      SELECT j.* FROM (SELECT p.job_id FROM pgqueue.permit p WHERE p.queue = gate.queue ORDER BY p.job_id) p
      CROSS JOIN LATERAL (
        SELECT j.id, j.lease, j.attempt, j.claimed_at FROM pgqueue.job j
        WHERE j.id = p.job_id AND j.queue = gate.queue AND j.key IS NOT NULL AND j.lease <> 0 AND j.deadline <= clock_timestamp()
        FOR NO KEY UPDATE SKIP LOCKED) j),
    u AS (UPDATE pgqueue.job j SET lease = 0, deadline = '-infinity', lost = j.lost + 1 FROM g WHERE j.id = g.id)
    INSERT INTO pgqueue.attempt_log (job_id, attempt, outcome, lease, started_at, error_type, error, worker)
    SELECT g.id, g.attempt, 'lost', g.lease, g.claimed_at, 'WorkerLost', 'the worker vanished: its lease ran out unrenewed',
           (SELECT w.host || ':' || w.pid FROM pgqueue.worker w WHERE w.nonce = g.lease >> 32)
    FROM g;
    DELETE FROM pgqueue.permit p WHERE p.queue = gate.queue AND NOT EXISTS (
      SELECT FROM pgqueue.job j WHERE j.id = p.job_id AND j.queue = p.queue
        AND CASE WHEN j.lease <> 0 THEN j.deadline > clock_timestamp() - interval '1 min'
                 ELSE j.key IS NULL AND j.lost > 0 AND j.claimed_at > clock_timestamp() - interval '10 min' END OFFSET 0);
    n := least(n, s.slots - (SELECT count(*) FROM pgqueue.permit p WHERE p.queue = gate.queue));
  END IF;
  IF s.rate_per_s IS NOT NULL THEN
    -- How far the pace is ahead, in jobs; never by more than a burst, whatever became of the clock.
    ahead := least(greatest(0, extract(epoch FROM s.tat - clock_timestamp()) * s.rate_per_s), s.burst);
    n := least(n, floor(s.burst - ahead)::int);
    wait := greatest(0, ahead - s.burst + 1) / s.rate_per_s;
  END IF;
  n := greatest(n, 0);
  RETURN NEXT;
END $$;
COMMENT ON FUNCTION pgqueue.gate IS 'How many jobs of a queue may begin now, and after how many seconds the next one; holds the queue''s row to the end of the transaction.';

CREATE FUNCTION pgqueue.gate_pass(queue text, ids bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE pgqueue.queue q SET tat = least(greatest(q.tat, clock_timestamp()), clock_timestamp() + coalesce(q.burst, greatest(1, q.rate_per_s)) / q.rate_per_s * interval '1 s')
    + cardinality($2) / q.rate_per_s * interval '1 s'
  WHERE q.name = $1 AND q.rate_per_s IS NOT NULL;
  INSERT INTO pgqueue.permit (queue, job_id) SELECT $1, u.id FROM unnest($2) u(id)
  WHERE EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = $1 AND q.slots IS NOT NULL) ORDER BY u.id ON CONFLICT DO NOTHING;
END $$;
COMMENT ON FUNCTION pgqueue.gate_pass IS 'Note which jobs began, in the transaction that asked the gate.';

-- Limits are changed while jobs run: NULL leaves one as it is, 0 lifts it. Workers see it within a second.
CREATE FUNCTION pgqueue.limit_job(name text, slots int DEFAULT NULL, rate_per_s double precision DEFAULT NULL,
  key_slots int DEFAULT NULL, key_rate_per_s double precision DEFAULT NULL) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  t record; problem text;
BEGIN
  SELECT * INTO t FROM pgqueue.job_type x WHERE x.name = limit_job.name FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  problem := CASE
    WHEN limit_job.slots NOT BETWEEN 0 AND 10000 THEN format('a limit of %s is not 1 to 10000 (0: none)', limit_job.slots)
    WHEN limit_job.key_slots NOT BETWEEN 0 AND 10000 THEN format('a key limit of %s is not 1 to 10000 (0: none)', limit_job.key_slots)
    WHEN limit_job.rate_per_s < 0 OR limit_job.rate_per_s IN ('NaN', 'Infinity') THEN format('a rate of %s a second is not above 0 (0: none)', limit_job.rate_per_s)
    WHEN limit_job.key_rate_per_s < 0 OR limit_job.key_rate_per_s IN ('NaN', 'Infinity') THEN format('a key rate of %s a second is not above 0 (0: none)', limit_job.key_rate_per_s)
  END;
  -- With a rate and no limit, one at once.
  t.rate_per_s := coalesce(nullif(limit_job.rate_per_s, 0), CASE WHEN limit_job.rate_per_s IS NULL THEN t.rate_per_s END);
  t.key_rate_per_s := coalesce(nullif(limit_job.key_rate_per_s, 0), CASE WHEN limit_job.key_rate_per_s IS NULL THEN t.key_rate_per_s END);
  t.slots := coalesce(nullif(limit_job.slots, 0), CASE WHEN limit_job.slots IS NULL THEN t.slots END, CASE WHEN t.rate_per_s IS NOT NULL THEN 1 END);
  t.key_slots := coalesce(nullif(limit_job.key_slots, 0), CASE WHEN limit_job.key_slots IS NULL THEN t.key_slots END, CASE WHEN t.key_rate_per_s IS NOT NULL THEN 1 END);
  problem := coalesce(problem, CASE
    WHEN t.slots IS NOT NULL AND t.key_slots IS NOT NULL THEN 'a job has a limit or a key limit, not both'
    WHEN t.on_dead = 'block' AND num_nonnulls(t.slots, t.key_slots) > 0 THEN 'its ordering keys block when a job dies (on_dead), and a limited job has none' END);
  IF problem IS NOT NULL THEN
    RAISE EXCEPTION USING MESSAGE = format('pgqueue.limit_job of %L: %s', left(limit_job.name, 200), problem), ERRCODE = '22023';
  END IF;
  UPDATE pgqueue.job_type x SET slots = t.slots, rate_per_s = t.rate_per_s, key_slots = t.key_slots, key_rate_per_s = t.key_rate_per_s, limits_set = true
  WHERE x.name = limit_job.name;
  RETURN true;
END $$;
COMMENT ON FUNCTION pgqueue.limit_job IS 'Change the limits of a job type while jobs run; 0 lifts one, NULL leaves it. false where there is no such type.';

CREATE FUNCTION pgqueue.limit_queue(queue text, slots int DEFAULT NULL, rate_per_s double precision DEFAULT NULL, burst double precision DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  problem text := CASE
    WHEN btrim(coalesce(limit_queue.queue, '')) = '' OR octet_length(limit_queue.queue) > 200 THEN 'the queue is blank or has more than 200 bytes'
    WHEN limit_queue.slots NOT BETWEEN 0 AND 100000 THEN format('a limit of %s is not 1 to 100000 (0: none)', limit_queue.slots)
    WHEN limit_queue.rate_per_s <> 0 AND limit_queue.rate_per_s NOT BETWEEN 1e-6 AND 1e6 THEN format('a rate of %s a second is not 0.000001 to 1000000 (0: none)', limit_queue.rate_per_s)
    WHEN limit_queue.burst NOT BETWEEN 1 AND 1000000 THEN format('a burst of %s is not 1 to 1000000', limit_queue.burst) END;
BEGIN
  IF problem IS NULL AND limit_queue.burst IS NOT NULL AND coalesce(limit_queue.rate_per_s, (SELECT q.rate_per_s FROM pgqueue.queue q WHERE q.name = limit_queue.queue), 0) = 0 THEN
    problem := 'a burst goes with a rate';
  END IF;
  IF problem IS NOT NULL THEN
    RAISE EXCEPTION USING MESSAGE = format('pgqueue.limit_queue of %L: %s', left(limit_queue.queue, 200), problem), ERRCODE = '22023';
  END IF;
  INSERT INTO pgqueue.queue AS q (name, slots, rate_per_s, burst)
  VALUES (limit_queue.queue, nullif(limit_queue.slots, 0), nullif(limit_queue.rate_per_s, 0)::real, limit_queue.burst::real)
  ON CONFLICT (name) DO UPDATE SET
    slots = CASE WHEN limit_queue.slots IS NULL THEN q.slots ELSE excluded.slots END,
    rate_per_s = CASE WHEN limit_queue.rate_per_s IS NULL THEN q.rate_per_s ELSE excluded.rate_per_s END,
    burst = CASE WHEN limit_queue.rate_per_s = 0 THEN NULL ELSE coalesce(excluded.burst, q.burst) END,
    tat = CASE WHEN limit_queue.rate_per_s IS NULL THEN q.tat END;
END $$;
COMMENT ON FUNCTION pgqueue.limit_queue IS 'Limit how many jobs of a queue run at once, and how many begin in a second, over all workers; 0 lifts one, NULL leaves it.';

-- Lanes that wait for a time a second or more ahead (a backoff, a rate, a blocked key) leave the index that claims read,
-- and come back when it has come: a hundred thousand of them cost a claim nothing.
ALTER TABLE pgqueue.lane ADD COLUMN wake_at timestamptz;
CREATE INDEX lane_parked ON pgqueue.lane (wake_at) WHERE wake_at IS NOT NULL;
DROP INDEX pgqueue.lane_ready;
CREATE INDEX lane_ready ON pgqueue.lane (queue, priority, pos) WHERE priority >= 0 AND wake_at IS NULL;

CREATE FUNCTION pgqueue.lane_wake() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE pgqueue.lane l SET wake_at = NULL, pos = nextval('pgqueue.pos_seq')
  FROM (SELECT p.ctid AS at FROM pgqueue.lane p WHERE p.wake_at <= statement_timestamp() ORDER BY p.wake_at LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED) p
  WHERE l.ctid = p.at;
END $$;
COMMENT ON FUNCTION pgqueue.lane_wake IS 'Put lanes whose time has come back among those that claims read.';

-- A key with a limit has as many slots as it has jobs, up to the limit: with one less a job would wait for no reason.
CREATE FUNCTION pgqueue.lane_grow(queue text, keys text[], prios smallint[], names text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO pgqueue.lane (queue, key, slot, priority, head_name)
  SELECT $1, d.k, g, d.p, d.n FROM unnest($2, $3, $4) d(k, p, n)
  JOIN pgqueue.job_type t ON t.name = d.n AND t.key_slots > 1 AND d.k <> '@' || d.n AND pgqueue.is_limit(d.k, d.n)
  CROSS JOIN LATERAL (
    SELECT count(*)::int AS n FROM (SELECT FROM pgqueue.job j WHERE j.queue = $1 AND j.key = d.k AND j.pos IS NOT NULL LIMIT t.key_slots) s) c
  CROSS JOIN generate_series(1, c.n - 1) g
  WHERE NOT EXISTS (SELECT FROM pgqueue.lane l WHERE l.queue = $1 AND l.key = d.k AND l.slot = g)
  ORDER BY d.k, g ON CONFLICT DO NOTHING;
END $$;

-- A lane rests for as long as the rate said when its job began; a new rate does not wait for that. It waits for whoever is
-- writing a lane, or the old rate would be written behind its back.
CREATE FUNCTION pgqueue.lane_rested() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  UPDATE pgqueue.lane l SET rest_until = '-infinity', wake_at = NULL, deadline = CASE WHEN l.lease = 0 THEN '-infinity' ELSE l.deadline END
  FROM (SELECT o.queue, o.key, o.slot FROM pgqueue.lane o WHERE o.key LIKE '@%' AND o.head_name = NEW.name AND (o.rest_until > '-infinity' OR o.lease <> 0)
        ORDER BY o.queue, o.key, o.slot FOR NO KEY UPDATE) o
  WHERE l.queue = o.queue AND l.key = o.key AND l.slot = o.slot;
  RETURN NULL;
END $$;
CREATE TRIGGER lane_rested AFTER UPDATE OF rate_per_s, key_rate_per_s ON pgqueue.job_type FOR EACH ROW
  WHEN ((NEW.rate_per_s, NEW.key_rate_per_s) IS DISTINCT FROM (OLD.rate_per_s, OLD.key_rate_per_s)) EXECUTE FUNCTION pgqueue.lane_rested();

CREATE OR REPLACE FUNCTION pgqueue.route(queues text[], floors bigint[])
RETURNS TABLE (ord int, examined int, last_pos bigint) LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off AS $$
DECLARE
  ks text[]; ps smallint[]; ns text[]; new_ks text[]; new_ps smallint[]; new_ns text[]; others text[]; stale text[];
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
    -- In order, one look-up each: a plan made while there were no lanes would compare each key with all of them, and before 17,
    -- = ANY with an ORDER BY reads all lanes of the queue. A lane that nobody has locked or changed stays without a lock: who deletes
    -- one locks it before he looks for its jobs, and would see the job that was seen here.
    WITH p AS MATERIALIZED (
      SELECT t.k, t.p, t.n, l.other, coalesce(l.quiet, false) AS quiet FROM unnest(ks, ps, ns) t(k, p, n)
      LEFT JOIN LATERAL (SELECT l.lease = 0 AND l.head_name <> t.n AS other, l.xmax = 0 AS quiet FROM pgqueue.lane l
                         WHERE l.queue = queues[i] AND l.key = t.k AND l.slot = 0 OFFSET 0) l ON true)
    SELECT array_agg(p.k) FILTER (WHERE NOT p.quiet), array_agg(p.p) FILTER (WHERE NOT p.quiet), array_agg(p.n) FILTER (WHERE NOT p.quiet),
           array_agg(p.k) FILTER (WHERE p.quiet AND p.other)
    INTO new_ks, new_ps, new_ns, stale FROM p;
    WHILE new_ks IS NOT NULL LOOP
      -- A lane that is there stays, once it is locked.
      WITH p AS MATERIALIZED (
        SELECT t.k, t.p, t.n, l.other FROM unnest(new_ks, new_ps, new_ns) t(k, p, n)
        LEFT JOIN LATERAL (SELECT l.lease = 0 AND l.head_name <> t.n AS other FROM pgqueue.lane l
                           WHERE l.queue = queues[i] AND l.key = t.k AND l.slot = 0 FOR KEY SHARE) l ON true)
      SELECT array_agg(p.k) FILTER (WHERE p.other IS NULL), array_agg(p.p) FILTER (WHERE p.other IS NULL),
             array_agg(p.n) FILTER (WHERE p.other IS NULL), array_agg(p.k) FILTER (WHERE p.other)
      INTO new_ks, new_ps, new_ns, others FROM p;
      stale := stale || others;
      EXIT WHEN new_ks IS NULL;
      -- What another transaction inserts meanwhile is looked at again; what is our own nobody deletes.
      WITH made AS (
        INSERT INTO pgqueue.lane AS l (queue, key, slot, priority, head_name)
        SELECT queues[i], d.k, g, d.p, d.n FROM unnest(new_ks, new_ps, new_ns) d(k, p, n)
        LEFT JOIN pgqueue.job_type t ON t.name = d.n AND pgqueue.is_limit(d.k, d.n)
        CROSS JOIN generate_series(0, CASE WHEN d.k = '@' || d.n THEN coalesce(t.slots, 1) WHEN t.key_rate_per_s IS NULL THEN 1 ELSE coalesce(t.key_slots, 1) END - 1) g
        ORDER BY d.k, g ON CONFLICT DO NOTHING
        RETURNING l.key, l.slot)
      SELECT array_agg(d.k), array_agg(d.p), array_agg(d.n) INTO new_ks, new_ps, new_ns
      FROM unnest(new_ks, new_ps, new_ns) d(k, p, n) WHERE d.k NOT IN (SELECT m.key FROM made m WHERE m.slot = 0);
    END LOOP;
    IF EXISTS (SELECT FROM unnest(ks) k WHERE k LIKE '@%') THEN
      PERFORM pgqueue.lane_grow(queues[i], ks, ps, ns);
    END IF;
    IF stale IS NOT NULL THEN -- a lane may have outlived the job that it is named after, or a late commit come in front of that
      PERFORM pgqueue.lane_refresh(array_fill(queues[i], ARRAY[cardinality(stale)]), stale);
    END IF;
  END LOOP;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.lane_unblock(queues text[], keys text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF cardinality(queues) IS NULL THEN
    RETURN;
  END IF;
  PERFORM FROM pgqueue.lane l JOIN unnest(queues, keys) t(q, k) ON l.queue = t.q AND l.key = t.k
  ORDER BY l.queue, l.key, l.slot FOR NO KEY UPDATE OF l;
  UPDATE pgqueue.lane l SET pos = nextval('pgqueue.pos_seq'), priority = coalesce(h.priority, l.priority), head_name = coalesce(h.name, l.head_name), wake_at = NULL,
    deadline = CASE WHEN l.lease <> 0 THEN coalesce((
      SELECT max(j.deadline) FROM pgqueue.job j WHERE j.queue = l.queue AND j.key = l.key AND j.pos IS NOT NULL AND j.lease = l.lease), '-infinity')
      ELSE '-infinity' END
  FROM unnest(queues, keys) t(q, k) LEFT JOIN LATERAL (
    SELECT j.priority, j.name FROM pgqueue.job j WHERE j.queue = t.q AND j.key = t.k AND j.pos IS NOT NULL AND j.lease = 0 ORDER BY j.id LIMIT 1) h ON true
  WHERE l.queue = t.q AND l.key = t.k AND l.deadline = 'infinity' AND pgqueue.lane_wait(t.q, t.k) IS NULL;
  PERFORM pgqueue.wake(t.q) FROM (SELECT DISTINCT u.q FROM unnest(queues) u(q)) t;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.lane_release(queues text[], keys text[], places bigint[], my_lease bigint, wait interval, keep_lost boolean DEFAULT false)
RETURNS int LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off AS $$
DECLARE
  n int; mq text[]; mk text[]; ms smallint[]; mr timestamptz[]; gq text[]; gk text[]; dq text[]; dk text[]; ds smallint[];
BEGIN
  SELECT array_agg(l.queue), array_agg(l.key), array_agg(l.slot), array_agg(l.rest_until) INTO mq, mk, ms, mr
  FROM unnest(queues, keys, places) t(q, k, p)
  CROSS JOIN LATERAL (
    SELECT l.queue, l.key, l.slot, l.rest_until FROM pgqueue.lane l
    WHERE l.queue = t.q AND l.key = t.k AND l.pos = coalesce(t.p, l.pos) AND l.lease = my_lease FOR UPDATE SKIP LOCKED) l;
  -- Locked against routing, a lane without a job goes.
  WITH d AS (
    DELETE FROM pgqueue.lane l WHERE l.ctid = ANY (ARRAY (
      SELECT y.at FROM unnest(mq, mk, mr) d(q, k, r)
      CROSS JOIN LATERAL (SELECT l.ctid AS at FROM pgqueue.lane l WHERE l.queue = d.q AND l.key = d.k AND l.slot = 0 OFFSET 0) y
      WHERE NOT d.k LIKE '@%' AND d.r <= clock_timestamp()
        AND NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = d.q AND j.key = d.k AND j.pos IS NOT NULL)))
    RETURNING l.queue, l.key)
  SELECT array_agg(d.queue), array_agg(d.key) INTO gq, gk FROM d;
  n := coalesce(cardinality(mq), 0);
  IF n < cardinality(keys) THEN -- what routing has locked, for it has seen a job
    SELECT array_agg(l.queue), array_agg(l.key), array_agg(l.slot), array_agg(l.rest_until) INTO mq, mk, ms, mr
    FROM unnest(queues, keys, places) t(q, k, p)
    CROSS JOIN LATERAL (
      SELECT l.queue, l.key, l.slot, l.rest_until FROM pgqueue.lane l
      WHERE l.queue = t.q AND l.key = t.k AND l.pos = coalesce(t.p, l.pos) AND l.lease = my_lease FOR NO KEY UPDATE SKIP LOCKED) l;
    n := coalesce(cardinality(mq), 0) + coalesce(cardinality(gk), 0);
  END IF;
  IF n > coalesce(cardinality(gk), 0) THEN
    WITH mine AS MATERIALIZED (
      SELECT t.q, t.k, t.s, CASE WHEN EXISTS (SELECT FROM pgqueue.dead_job d WHERE d.queue = t.q AND d.key = t.k AND d.blocks)
        THEN coalesce(pgqueue.lane_wait(t.q, t.k), '-infinity')
        ELSE greatest(CASE WHEN wait = interval '0' THEN '-infinity' ELSE clock_timestamp() + wait END, nullif(t.r, '-infinity')) END AS until
      FROM unnest(mq, mk, ms, mr) t(q, k, s, r)
      WHERE gk IS NULL OR NOT EXISTS (SELECT FROM unnest(gq, gk) g(q, k) WHERE g.q = t.q AND g.k = t.k))
    UPDATE pgqueue.lane l SET lease = 0, deadline = mine.until, wake_at = CASE WHEN mine.until > clock_timestamp() + interval '1 s' THEN mine.until END,
      pos = nextval('pgqueue.pos_seq'), lost = CASE WHEN keep_lost THEN l.lost ELSE 0 END,
      priority = coalesce(h.priority, l.priority), head_name = coalesce(h.name, l.head_name)
    FROM mine LEFT JOIN LATERAL (SELECT j.priority, j.name FROM pgqueue.job j WHERE j.queue = mine.q AND j.key = mine.k
      AND j.pos IS NOT NULL AND j.lease = 0 ORDER BY j.id LIMIT 1) h ON true
    WHERE l.queue = mine.q AND l.key = mine.k AND l.slot = mine.s;
  END IF;
  -- The slots of a limit: never while slot 0, for which route looks, is held or rests, as the next burst needs all of them.
  IF EXISTS (SELECT FROM unnest(keys) k WHERE k LIKE '@%') THEN
    SELECT array_agg(f.queue), array_agg(f.key), array_agg(f.slot) INTO dq, dk, ds FROM (
      SELECT e.*, bool_or(e.slot = 0) OVER (PARTITION BY e.queue, e.key) AS first FROM (
        SELECT l.* FROM (SELECT DISTINCT u.q, u.k FROM unnest(queues, keys) u(q, k) WHERE u.k LIKE '@%') t
        CROSS JOIN LATERAL (SELECT l.queue, l.key, l.slot FROM pgqueue.lane l WHERE l.queue = t.q AND l.key = t.k AND l.lease = 0
          AND l.rest_until <= clock_timestamp() AND NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = t.q AND j.key = t.k AND j.pos IS NOT NULL)
          FOR UPDATE SKIP LOCKED) l) e) f
    WHERE f.first OR NOT EXISTS (SELECT FROM pgqueue.lane o WHERE o.queue = f.queue AND o.key = f.key AND o.slot = 0);
    IF dq IS NOT NULL THEN
      DELETE FROM pgqueue.lane l USING unnest(dq, dk, ds) d(q, k, s)
      WHERE l.queue = d.q AND l.key = d.k AND l.slot = d.s
        AND NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = d.q AND j.key = d.k AND j.pos IS NOT NULL);
    END IF;
  END IF;
  RETURN n;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.lane_slots() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO pgqueue.lane (queue, key, slot, priority, head_name)
  SELECT l.queue, l.key, g, l.priority, l.head_name
  FROM (SELECT DISTINCT ON (a.queue) a.* FROM pgqueue.lane a WHERE a.key = '@' || NEW.name ORDER BY a.queue, a.slot) l
  CROSS JOIN generate_series(0, NEW.slots - 1) g
  ORDER BY l.queue, g ON CONFLICT DO NOTHING;
  PERFORM pgqueue.lane_grow(l.queue, array_agg(l.key), array_agg(l.priority), array_agg(l.head_name)) FROM pgqueue.lane l
  WHERE l.slot = 0 AND l.head_name = NEW.name AND l.key LIKE '@%' AND l.key <> '@' || NEW.name GROUP BY l.queue;
  RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.lane_claim(queues text[], prios smallint[], floors bigint[], names text[], k int, m int, total int, new_lease bigint, vt interval)
RETURNS TABLE (ord bigint, lane_pos bigint, id bigint, queue text, key text, name text, priority smallint, attempt smallint,
               max_attempts smallint, timeout_s real, lost smallint, enqueued_at timestamptz, expires_at timestamptz,
               idempotency_key text, backoff text, headers text, payload text)
LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off SET enable_nestloop = on AS $$
#variable_conflict use_column
DECLARE
  r record; took int; handed int := 0; left_behind int; eq text[] := '{}'; ek text[] := '{}'; ep bigint[] := '{}'; lim int;
  kind record; rest interval; surplus boolean; head record; orphan boolean; ordered boolean;
  lo bigint[]; lp bigint[]; lq text[]; lk text[]; ls smallint[]; ll bigint[]; lx smallint[]; lh text[]; common boolean[]; tried int := 0;
  ho bigint[]; hp bigint[]; ht tid[];
BEGIN
  PERFORM pgqueue.lane_wake();
  WITH w AS MATERIALIZED (
    SELECT v.o, x.* FROM unnest(lane_claim.queues, lane_claim.prios, lane_claim.floors) WITH ORDINALITY v(q, p, f, o)
    CROSS JOIN LATERAL (SELECT l.queue, l.key, l.slot, l.pos, l.head_name FROM pgqueue.lane l
      WHERE l.queue = v.q AND l.priority = v.p AND l.priority >= 0 AND l.wake_at IS NULL AND l.pos > v.f AND l.deadline <= statement_timestamp()
        AND l.head_name = ANY (lane_claim.names)
      ORDER BY l.pos LIMIT 5000) x),
  taken AS MATERIALIZED (
    SELECT w.o, w.pos, y.* FROM w
    CROSS JOIN LATERAL (SELECT l.queue, l.key, l.slot, l.lease, l.lost, l.head_name FROM pgqueue.lane l
      WHERE l.queue = w.queue AND l.key = w.key AND l.slot = w.slot AND l.deadline <= statement_timestamp()
        AND l.rest_until <= statement_timestamp() AND l.head_name = ANY (lane_claim.names)
      FOR NO KEY UPDATE SKIP LOCKED) y
    LIMIT lane_claim.k)
  SELECT array_agg(t.o), array_agg(t.pos), array_agg(t.queue), array_agg(t.key), array_agg(t.slot), array_agg(t.lease), array_agg(t.lost), array_agg(t.head_name),
         array_agg(t.lease = 0 AND t.lost = 0 AND NOT t.key LIKE '@%')
  INTO lo, lp, lq, lk, ls, ll, lx, lh, common FROM taken t;
  FOR r IN
    SELECT * FROM unnest(lo, lp, lq, lk, ls, ll, lx, lh, common) WITH ORDINALITY u(o, pos, queue, key, slot, lease, lost, head_name, common, n)
  LOOP
    EXIT WHEN handed >= lane_claim.total;
    IF r.common THEN
      -- What most lanes are: free, never lost, no limit. All up to the next of another kind hand out their jobs at once; one that has
      -- none to hand out (no job, a stamped one, a block) is looked at by itself below.
      IF r.n > tried THEN
        tried := coalesce(array_position(common, false, r.n::int) - 1, cardinality(common));
        PERFORM pg_catalog.set_config('enable_nestloop', 'off', true); -- what looks up one by one is LATERAL; the rest is to be hashed
        WITH t AS MATERIALIZED (
          SELECT u.* FROM unnest(lo[r.n : tried], lp[r.n : tried], lq[r.n : tried], lk[r.n : tried]) WITH ORDINALITY u(o, p, q, k, n)
          WHERE NOT EXISTS (SELECT FROM pgqueue.dead_job d WHERE d.queue = u.q AND d.key = u.k AND d.blocks) ORDER BY u.n),
        h AS MATERIALIZED (
          SELECT t.o, t.p, t.n, x.* FROM t
          CROSS JOIN LATERAL (SELECT j.id, j.ctid AS tid, j.lease = 0 AND j.name = ANY (lane_claim.names) AS ours FROM pgqueue.job j
            WHERE j.queue = t.q AND j.key = t.k AND j.pos IS NOT NULL ORDER BY j.id LIMIT lane_claim.m) x
          LIMIT lane_claim.total - handed),
        g AS MATERIALIZED (
          SELECT j.ctid AS tid FROM pgqueue.job j
          WHERE j.ctid = ANY (ARRAY (SELECT h.tid FROM h WHERE h.ours)) AND j.lease = 0 FOR NO KEY UPDATE SKIP LOCKED),
        -- Mostly all are ours and got their lock, where they stood. Else none behind one that did not.
        f AS MATERIALIZED (
          SELECT z.* FROM (SELECT h.*, bool_and(g.tid IS NOT NULL) OVER (PARTITION BY h.n ORDER BY h.id) AS unbroken FROM h LEFT JOIN g ON g.tid = h.tid) z
          WHERE z.unbroken)
        SELECT e.* INTO ho, hp, ht FROM (SELECT ARRAY (SELECT g.tid FROM g ORDER BY g.tid) = ARRAY (SELECT h.tid FROM h ORDER BY h.tid) AS whole) w
        CROSS JOIN LATERAL (
          SELECT array_agg(h.o), array_agg(h.p), array_agg(h.tid) FROM h WHERE w.whole HAVING w.whole
          UNION ALL
          SELECT array_agg(f.o), array_agg(f.p), array_agg(f.tid) FROM f WHERE NOT w.whole HAVING NOT w.whole) e;
        PERFORM pg_catalog.set_config('enable_nestloop', 'on', true);
        UPDATE pgqueue.lane l SET lease = lane_claim.new_lease, deadline = clock_timestamp() + lane_claim.vt
        WHERE l.ctid = ANY (ARRAY (SELECT y.at FROM unnest(lp[r.n : tried], lq[r.n : tried], lk[r.n : tried]) y0(p, q, k)
          CROSS JOIN LATERAL (SELECT l.ctid AS at FROM pgqueue.lane l WHERE l.queue = y0.q AND l.key = y0.k AND l.slot = 0 AND y0.p = ANY (hp) OFFSET 0) y));
        RETURN QUERY
          UPDATE pgqueue.job j SET lease = lane_claim.new_lease, deadline = clock_timestamp() + lane_claim.vt, attempt = least(j.attempt + 1, 32767), claimed_at = statement_timestamp()
          FROM unnest(ho, hp, ht) x(o, p, tid) WHERE j.ctid = x.tid
          RETURNING x.o, x.p, j.id, j.queue, j.key, j.name, j.priority, j.attempt, j.max_attempts, j.timeout_s, j.lost, j.enqueued_at, j.expires_at,
            j.idempotency_key, j.backoff::text, j.headers::text, j.payload::text;
        GET DIAGNOSTICS took = ROW_COUNT;
        handed := handed + took;
        EXIT WHEN handed >= lane_claim.total;
      END IF;
      CONTINUE WHEN EXISTS (SELECT FROM pgqueue.lane l WHERE l.queue = r.queue AND l.key = r.key AND l.slot = r.slot AND l.lease = lane_claim.new_lease);
    END IF;
    rest := NULL; surplus := false; orphan := false; ordered := NOT (r.key LIKE '@%' AND pgqueue.is_limit(r.key, r.head_name));
    IF NOT ordered THEN
      SELECT CASE WHEN r.key = '@' || t.name THEN t.slots ELSE t.key_slots END AS slots,
             CASE WHEN r.key = '@' || t.name THEN t.rate_per_s ELSE t.key_rate_per_s END AS rate_per_s
      INTO kind FROM pgqueue.job_type t WHERE t.name = r.head_name;
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
          GET DIAGNOSTICS took = ROW_COUNT;
          orphan := took > 0;
        END IF;
        -- Nothing overtakes a stamp. A free slot whose jobs all run already stays as it is; a lane without any job is taken, to be deleted.
        CONTINUE WHEN ordered AND NOT orphan OR NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = r.queue AND j.key = r.key AND j.pos IS NOT NULL AND j.lease = 0);
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
      UPDATE pgqueue.lane l SET lease = 0, deadline = u.until, wake_at = CASE WHEN u.until > clock_timestamp() + interval '1 s' THEN u.until END
      FROM (SELECT coalesce(pgqueue.lane_wait(r.queue, r.key), '-infinity') AS until) u
      WHERE l.queue = r.queue AND l.key = r.key AND l.slot = r.slot;
      CONTINUE;
    END IF;
    RETURN QUERY
      WITH h AS MATERIALIZED (
        SELECT z.id, z.tid, z.n FROM (SELECT j.id, j.tid, row_number() OVER o AS n, bool_and(j.lease = 0 AND j.name = ANY (lane_claim.names)) OVER o AS mine
          FROM (SELECT j0.id, j0.ctid AS tid, j0.name, j0.lease FROM pgqueue.job j0
                WHERE j0.queue = r.queue AND j0.key = r.key AND j0.pos IS NOT NULL AND (ordered OR j0.lease = 0) ORDER BY j0.id LIMIT lim) j WINDOW o AS (ORDER BY j.id)) z WHERE z.mine),
      g AS MATERIALIZED (
        SELECT h.tid, h.n FROM h
        CROSS JOIN LATERAL (SELECT j.ctid AS tid FROM pgqueue.job j WHERE j.ctid = h.tid AND j.id = h.id AND j.lease = 0 FOR NO KEY UPDATE SKIP LOCKED) y
        WHERE y.tid = h.tid) -- one that has moved meanwhile is as good as locked
      UPDATE pgqueue.job j SET lease = lane_claim.new_lease, deadline = clock_timestamp() + lane_claim.vt, attempt = least(j.attempt + 1, 32767), claimed_at = statement_timestamp()
      FROM (SELECT g.tid, g.n = row_number() OVER (ORDER BY g.n) AS unbroken FROM g) f -- none behind one that somebody has locked
      WHERE j.ctid = f.tid AND f.unbroken
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

CREATE OR REPLACE FUNCTION pgqueue.age(page int DEFAULT 1000) RETURNS int LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off AS $$
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
        SELECT l.key FROM pgqueue.lane l WHERE l.queue = q.name AND l.priority = p.level AND l.priority >= 0 AND l.wake_at IS NULL
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

CREATE OR REPLACE FUNCTION pgqueue.job_state(id bigint) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT CASE
    WHEN j.lease <> 0 AND j.deadline > now() THEN 'in_flight'
    WHEN j.run_at > now() THEN 'delayed'
    WHEN j.key IS NOT NULL AND j.run_at IS NULL AND s.n <= (
      SELECT count(*) FROM (SELECT FROM pgqueue.job b
        WHERE b.queue = j.queue AND b.key = j.key AND b.pos IS NOT NULL AND b.id < j.id LIMIT s.n) b) THEN 'blocked'
    WHEN l.lease = 0 AND l.deadline > now() AND l.deadline < 'infinity' THEN 'delayed'
    WHEN j.lease = 0 AND q.slots <= (
      SELECT count(*) FROM pgqueue.permit p
      WHERE p.queue = j.queue AND EXISTS (SELECT FROM pgqueue.job b WHERE b.id = p.job_id AND b.lease <> 0 AND b.deadline > now() OFFSET 0)) THEN 'blocked'
    WHEN q.paused OR t.paused OR l.deadline = 'infinity' THEN 'blocked'
    ELSE 'ready' END
  FROM pgqueue.job j
  LEFT JOIN pgqueue.queue q ON q.name = j.queue
  LEFT JOIN pgqueue.job_type t ON t.name = j.name
  CROSS JOIN LATERAL (SELECT CASE WHEN j.key = '@' || j.name THEN coalesce(t.slots, 1) WHEN pgqueue.is_limit(j.key, j.name) THEN coalesce(t.key_slots, 1) ELSE 1 END AS n) s
  LEFT JOIN pgqueue.lane l ON j.key IS NOT NULL AND j.run_at IS NULL AND l.queue = j.queue AND l.key = j.key AND l.slot = 0
  WHERE j.id = job_state.id
$$;

CREATE OR REPLACE VIEW pgqueue.queue_depth AS
WITH s AS (
  SELECT j.queue,
    CASE WHEN j.lease <> 0 AND j.deadline > now() THEN 'in_flight'
         WHEN j.run_at > now() THEN 'delayed'
         WHEN j.key IS NOT NULL AND j.run_at IS NULL
           AND row_number() OVER (PARTITION BY j.queue, j.key, j.run_at IS NULL ORDER BY j.id) > CASE WHEN j.key = '@' || j.name THEN coalesce(t.slots, 1) WHEN pgqueue.is_limit(j.key, j.name) THEN coalesce(t.key_slots, 1) ELSE 1 END THEN 'blocked'
         WHEN l.lease = 0 AND l.deadline > now() AND l.deadline < 'infinity' THEN 'delayed'
         WHEN j.lease = 0 AND q.slots <= c.held THEN 'blocked'
         WHEN q.paused OR t.paused OR l.deadline = 'infinity' THEN 'blocked'
         ELSE 'ready' END AS state,
    greatest(j.enqueued_at, j.ready_at, j.run_at, j.deadline, CASE WHEN l.lease = 0 THEN l.deadline END) AS ready_since
  FROM pgqueue.job j
  LEFT JOIN pgqueue.queue q ON q.name = j.queue
  LEFT JOIN (SELECT p.queue, count(*) AS held FROM pgqueue.permit p JOIN pgqueue.job b ON b.id = p.job_id AND b.lease <> 0 AND b.deadline > now() GROUP BY p.queue) c ON c.queue = j.queue
  LEFT JOIN pgqueue.job_type t ON t.name = j.name
  LEFT JOIN pgqueue.lane l ON j.key IS NOT NULL AND j.run_at IS NULL AND l.queue = j.queue AND l.key = j.key AND l.slot = 0)
SELECT queue, count(*) FILTER (WHERE state = 'ready') AS ready, count(*) FILTER (WHERE state = 'delayed') AS delayed,
       count(*) FILTER (WHERE state = 'in_flight') AS in_flight, count(*) FILTER (WHERE state = 'blocked') AS blocked,
       coalesce(extract(epoch FROM now() - min(ready_since) FILTER (WHERE state = 'ready')), 0)::double precision AS oldest_ready_s
FROM s GROUP BY queue;

CREATE TRIGGER lane_key_slots AFTER UPDATE OF key_slots ON pgqueue.job_type FOR EACH ROW
  WHEN (NEW.key_slots IS DISTINCT FROM OLD.key_slots AND NEW.key_slots IS NOT NULL) EXECUTE FUNCTION pgqueue.lane_slots();

-- Limits hold for what waits too: it gets the key of the new limits, or loses that of one that was lifted, and a new place
-- above what claims and routing have looked at. Jobs that run, or that somebody holds, keep theirs. A limit set by hand is
-- applied each time it is set: what was enqueued by a transaction that had not committed is found by the next.
CREATE FUNCTION pgqueue.limit_waiting() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  held bigint; qs text[]; ks text[];
BEGIN
  SELECT j.id INTO held FROM pgqueue.job j WHERE NEW.slots IS NOT NULL AND j.name = NEW.name AND j.key <> '@' || NEW.name LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION 'a type has a limit or its jobs have keys: jobs of % have, such as job %', NEW.name, held
      USING ERRCODE = '22023', HINT = 'Enqueue them without a key, and let these run or cancel them; or limit each key.';
  END IF;
  WITH l AS MATERIALIZED (
    SELECT j.id, j.queue, j.pos, j.key AS was, pgqueue.limit_key(NEW.name, j.key, NEW.slots, NEW.key_slots) AS key FROM pgqueue.job j
    WHERE j.name = NEW.name AND j.lease = 0 AND j.key IS DISTINCT FROM pgqueue.limit_key(NEW.name, j.key, NEW.slots, NEW.key_slots)
    ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED),
  o AS MATERIALIZED (
    SELECT s.*, CASE WHEN s.pos IS NOT NULL THEN nextval('pgqueue.pos_seq') END AS place FROM (SELECT l.* FROM l ORDER BY l.pos) s),
  u AS (
    UPDATE pgqueue.job j SET key = o.key, pos = o.place FROM o WHERE j.id = o.id RETURNING j.queue, o.was)
  SELECT array_agg(d.queue), array_agg(d.was) INTO qs, ks FROM (SELECT DISTINCT u.queue, u.was FROM u) d;
  PERFORM pgqueue.lane_refresh(qs, ks); -- an ordering key may be another type's too
  PERFORM pgqueue.wake(d.q) FROM (SELECT DISTINCT u.q FROM unnest(qs) u(q)) d;
  RETURN NULL;
END $$;
CREATE TRIGGER limit_waiting AFTER UPDATE OF slots, key_slots ON pgqueue.job_type FOR EACH ROW
  WHEN (NEW.limits_set OR (NEW.slots, NEW.key_slots) IS DISTINCT FROM (OLD.slots, OLD.key_slots)) EXECUTE FUNCTION pgqueue.limit_waiting();
CREATE TRIGGER limit_waiting_new AFTER INSERT ON pgqueue.job_type FOR EACH ROW
  WHEN (num_nonnulls(NEW.slots, NEW.key_slots) > 0) EXECUTE FUNCTION pgqueue.limit_waiting();

-- End of limits.

-- Outbox --------------------------------------------------------------------------------------------------

-- The count stands in the generated column as a literal, so another one rewrites the table. A relay that was stopped past
-- its lease and wakes later finds that it owns nothing, and reads its partitions anew.
CREATE FUNCTION pgqueue.outbox_repartition(partitions int) RETURNS void LANGUAGE plpgsql SET lock_timeout = '5s' AS $$
DECLARE
  alive text;
BEGIN
  IF partitions IS NULL OR partitions NOT BETWEEN 1 AND 1024 THEN
    RAISE EXCEPTION 'pgqueue.outbox_repartition: % is not a number from 1 to 1024', partitions USING ERRCODE = '22023';
  END IF;
  LOCK TABLE pgqueue.relay, pgqueue.relay_partition, pgqueue.outbox IN ACCESS EXCLUSIVE MODE;
  SELECT pg_catalog.string_agg(r.name, ', ' ORDER BY r.name) INTO alive FROM pgqueue.relay r WHERE r.lease_until > pg_catalog.clock_timestamp();
  IF alive IS NOT NULL THEN
    RAISE EXCEPTION 'pgqueue.outbox_repartition: relays are alive: %', alive USING ERRCODE = '55006', HINT = 'Stop them first.';
  END IF;
  EXECUTE pg_catalog.format('ALTER TABLE pgqueue.outbox DROP COLUMN part, ADD COLUMN part smallint NOT NULL GENERATED ALWAYS AS '
    '((pg_catalog.hashtextextended(coalesce(aggregate_id, id::text), 0) & 2147483647) %% %s) STORED', partitions);
  CREATE INDEX outbox_pending ON pgqueue.outbox (part, id) WHERE published_at IS NULL AND parked_at IS NULL;
  CREATE INDEX outbox_trouble ON pgqueue.outbox (part, id)
    WHERE published_at IS NULL AND last_error IS NOT NULL AND (parked_at IS NULL OR next_attempt_at IS NOT NULL);
  DELETE FROM pgqueue.relay_partition;
  INSERT INTO pgqueue.relay_partition (part) SELECT pg_catalog.generate_series(0, partitions - 1);
END $$;
COMMENT ON FUNCTION pgqueue.outbox_repartition IS 'Divide the outbox into another number of partitions while no relay runs; rewrites the table under an exclusive lock.';

-- Workers -------------------------------------------------------------------------------------------------

ALTER TABLE pgqueue.worker ADD COLUMN overrun int NOT NULL DEFAULT 0;
COMMENT ON COLUMN pgqueue.worker.overrun IS 'Attempts that timed out and whose handlers go on: each keeps a slot.';

CREATE OR REPLACE VIEW pgqueue.workers AS
SELECT w.nonce, w.host, w.pid, w.version, w.queues, w.names, w.concurrency, w.in_flight, w.draining, w.started_at, w.beat_at,
       w.beat_at > now() - interval '30 s' AS alive, w.overrun
FROM pgqueue.worker w;

-- Operators -----------------------------------------------------------------------------------------------

CREATE VIEW pgqueue.unknown_names AS
WITH RECURSIVE plain AS (
  (SELECT j.queue FROM pgqueue.job j WHERE j.pos IS NOT NULL AND j.key IS NULL ORDER BY j.queue LIMIT 1)
  UNION ALL
  SELECT n.queue FROM plain p CROSS JOIN LATERAL (
    SELECT j.queue FROM pgqueue.job j WHERE j.pos IS NOT NULL AND j.key IS NULL AND j.queue > p.queue ORDER BY j.queue LIMIT 1) n),
keyed AS (
  (SELECT j.queue FROM pgqueue.job j WHERE j.pos IS NOT NULL AND j.key IS NOT NULL ORDER BY j.queue LIMIT 1)
  UNION ALL
  SELECT n.queue FROM keyed p CROSS JOIN LATERAL (
    SELECT j.queue FROM pgqueue.job j WHERE j.pos IS NOT NULL AND j.key IS NOT NULL AND j.queue > p.queue ORDER BY j.queue LIMIT 1) n),
seen AS (
  SELECT x.* FROM plain p CROSS JOIN generate_series(0, 9) l(priority) CROSS JOIN LATERAL (
    SELECT j.queue, j.name, j.lease, j.enqueued_at FROM pgqueue.job j
    WHERE j.queue = p.queue AND j.priority = l.priority AND j.pos IS NOT NULL AND j.key IS NULL ORDER BY j.pos LIMIT 1000) x
  UNION ALL
  SELECT x.* FROM keyed p CROSS JOIN LATERAL (
    SELECT j.queue, j.name, j.lease, j.enqueued_at FROM pgqueue.job j
    WHERE j.queue = p.queue AND j.pos > 0 AND j.key IS NOT NULL ORDER BY j.pos LIMIT 1000) x),
names AS (
  SELECT s.queue, s.name, count(*) AS jobs, min(s.enqueued_at) AS oldest FROM seen s WHERE s.lease = 0 GROUP BY s.queue, s.name)
SELECT n.queue, n.name, n.jobs, n.oldest FROM names n
WHERE EXISTS (SELECT FROM pgqueue.workers w WHERE w.alive AND n.queue = ANY (w.queues))
  AND NOT EXISTS (SELECT FROM pgqueue.workers w WHERE w.alive AND n.queue = ANY (w.queues) AND n.name = ANY (w.names));
COMMENT ON VIEW pgqueue.unknown_names IS 'Jobs that wait in a queue whose workers do not know their name. Looks at the first 1,000 of each queue and priority, '
  'where such jobs stay behind; jobs is how many of these.';

-- Counted by queue and name first: a hundred thousand letters are read once and not sorted.
CREATE OR REPLACE VIEW pgqueue.dead_by_error AS
WITH few AS (
  SELECT d.error_type, d.reason, d.queue, d.name, count(*) AS jobs, count(*) FILTER (WHERE d.died_at > now() - interval '10 min') AS last_10_min,
         min(d.died_at) AS first_seen, max(d.died_at) AS last_seen
  FROM pgqueue.dead_job d GROUP BY d.error_type, d.reason, d.queue, d.name)
SELECT f.error_type, f.reason, sum(f.jobs)::bigint AS jobs, sum(f.last_10_min)::bigint AS last_10_min, min(f.first_seen) AS first_seen,
       max(f.last_seen) AS last_seen, array_agg(DISTINCT f.queue) AS queues, array_agg(DISTINCT f.name) AS names
FROM few f GROUP BY f.error_type, f.reason;

CREATE OR REPLACE FUNCTION pgqueue.replay(ids bigint[], payload json DEFAULT NULL) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
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
    IF octet_length(replay.payload::text) > 1048576 THEN
      RAISE EXCEPTION 'pgqueue.replay: the payload has more than 1048576 bytes' USING ERRCODE = '22023';
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
    SELECT g.id, g.queue, g.name, g.priority, pgqueue.limit_key(g.name, g.key, t.slots, t.key_slots), g.dedup_key, g.idempotency_key, g.max_attempts, g.timeout_s,
      g.backoff, g.headers, coalesce(replay.payload, g.payload), g.enqueued_at,
      CASE WHEN g.expires_at > clock_timestamp() THEN g.expires_at END, clock_timestamp()
    FROM gone g LEFT JOIN pgqueue.job_type t ON t.name = g.name ORDER BY g.id
    RETURNING j.id;
  PERFORM pgqueue.lane_unblock(queues, keys);
END $$;

CREATE OR REPLACE FUNCTION pgqueue.grant_role(kind text, role name) RETURNS void LANGUAGE plpgsql AS $$
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
      'SELECT ON pgqueue.outbox_lag', 'SELECT ON pgqueue.schedule_status', 'SELECT ON pgqueue.batch_status', 'SELECT ON pgqueue.unknown_names', 'EXECUTE ON FUNCTION pgqueue.status', 'SELECT ON pgqueue.tally_minute', 'SELECT ON pgqueue.alembic_version']
  END;
  IF lines IS NULL THEN
    RAISE EXCEPTION 'kind of role is %, not producer, worker, relay or reader', kind USING ERRCODE = '22023';
  END IF;
  EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA pgqueue TO %I', role);
  FOREACH line IN ARRAY lines LOOP
    EXECUTE pg_catalog.format('GRANT %s TO %I', line, role);
  END LOOP;
  -- What revision the schema is at only its owner may write.
  IF kind = 'worker' AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_tables t WHERE t.schemaname = 'pgqueue' AND t.tablename = 'alembic_version' AND t.tableowner = role) THEN
    EXECUTE pg_catalog.format('REVOKE INSERT, UPDATE, DELETE ON pgqueue.alembic_version FROM %I', role);
  END IF;
END $$;

-- End of operators.

-- Batches -------------------------------------------------------------------------------------------------

-- A completion that cannot be enqueued waits by itself; the other batches go on.
ALTER TABLE pgqueue.batch ADD COLUMN problem text, ADD COLUMN retry_at timestamptz;
CREATE INDEX batch_retry ON pgqueue.batch (retry_at) WHERE retry_at IS NOT NULL;
COMMENT ON COLUMN pgqueue.batch.problem IS 'Why its completion job could not be enqueued.';
COMMENT ON COLUMN pgqueue.batch.retry_at IS 'When that is tried again; NULL where it went well, or the members have not ended.';

CREATE OR REPLACE FUNCTION pgqueue.fold_batches() RETURNS SETOF bigint LANGUAGE plpgsql AS $$
DECLARE
  bid    bigint;
  b      record;
  follow bigint;
BEGIN
  FOR bid IN
    (SELECT DISTINCT t.batch_id FROM pgqueue.batch_tally t ORDER BY t.batch_id LIMIT 1000)
    UNION
    (SELECT x.id FROM pgqueue.batch x WHERE x.retry_at <= statement_timestamp() ORDER BY x.retry_at LIMIT 100)
    ORDER BY 1
  LOOP
    PERFORM FROM pgqueue.batch x WHERE x.id = bid FOR NO KEY UPDATE;
    WITH d AS (DELETE FROM pgqueue.batch_tally t WHERE t.batch_id = bid RETURNING t.outcome, t.n)
    UPDATE pgqueue.batch x SET done = x.done + s.done, gone = x.gone + s.gone
    FROM (SELECT coalesce(sum(d.n) FILTER (WHERE d.outcome = 'done'), 0) AS done, coalesce(sum(d.n) FILTER (WHERE d.outcome = 'gone'), 0) AS gone FROM d) s
    WHERE x.id = bid RETURNING x.* INTO b;
    CONTINUE WHEN NOT FOUND OR b.completed_at IS NOT NULL OR b.done + b.gone < b.size OR b.retry_at > clock_timestamp();
    follow := NULL;
    IF b.completion IS NOT NULL THEN
      BEGIN
        SELECT * INTO follow FROM pgqueue.enqueue_step(b.completion, NULL, NULL);
      EXCEPTION WHEN OTHERS THEN
        UPDATE pgqueue.batch x SET problem = left(SQLERRM, 4000), retry_at = clock_timestamp() + interval '1 min' WHERE x.id = bid;
        CONTINUE;
      END;
    END IF;
    UPDATE pgqueue.batch x SET completed_at = clock_timestamp(), job_id = follow, problem = NULL, retry_at = NULL WHERE x.id = bid;
    RETURN NEXT bid;
  END LOOP;
END $$;
COMMENT ON FUNCTION pgqueue.fold_batches IS 'Count the members that ended and enqueue the completion jobs of whole batches; returns these. What cannot be enqueued '
  'is tried again after a minute. Called by workers.';

CREATE OR REPLACE VIEW pgqueue.batch_status AS
SELECT b.id, b.size, b.done, b.gone, b.size - b.done - b.gone AS unfinished, b.created_at, b.completed_at, b.job_id, b.problem, b.retry_at
FROM pgqueue.batch b;
COMMENT ON VIEW pgqueue.batch_status IS 'Batches: members in all, done, gone (cancelled or discarded), unfinished; the completion job once it is enqueued, or the '
  'problem that keeps it from that and when it is tried again.';

CREATE OR REPLACE FUNCTION pgqueue.enqueue_batch(steps json, completion json DEFAULT NULL, when_full text DEFAULT 'raise')
RETURNS TABLE (batch bigint, job bigint, full_queue text) LANGUAGE plpgsql AS $$
DECLARE
  step   json;
  made   bigint;
  total  int;
  follow bigint;
  wait_s int;
BEGIN
  -- What would be found out when the members have ended is refused while its caller can mend it. Without payloads and keys
  -- enqueue_many looks at the options alone.
  IF completion IS NOT NULL THEN
    IF json_typeof(completion -> 'payloads') IS DISTINCT FROM 'array' THEN
      RAISE EXCEPTION 'pgqueue.enqueue_batch: the payloads of the completion must be a JSON array' USING ERRCODE = '22023';
    END IF;
    PERFORM pgqueue.enqueue_step(json_object_agg(e.key, CASE WHEN e.key = 'payloads' OR e.key IN ('keys', 'idempotency_keys') AND json_typeof(e.value) = 'array' THEN '[]' ELSE e.value END))
    FROM json_each(completion) e;
    IF EXISTS (
      SELECT FROM json_each(completion) e CROSS JOIN LATERAL (
        SELECT count(*) AS n, bool_or(btrim(k) = '' OR octet_length(k) > 512) AS unfit
        FROM json_array_elements_text(CASE WHEN json_typeof(e.value) = 'array' THEN e.value END) k) k
      WHERE e.key IN ('keys', 'idempotency_keys') AND json_typeof(e.value) = 'array' AND (k.unfit OR k.n <> json_array_length(completion -> 'payloads'))) THEN
      RAISE EXCEPTION 'pgqueue.enqueue_batch: the completion needs one key for each payload, of 1 to 512 bytes' USING ERRCODE = '22023';
    END IF;
  END IF;
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

-- Idempotency keys ----------------------------------------------------------------------------------------

-- A job that is skipped, as its key has been applied, has no effect: nothing follows it. It is an ended member of its batch.
-- Rows are looked up one by one, and those it has locked are found again by their ctid: a worker keeps the plan that it made
-- while a table was empty, and a join would read the whole of it.
CREATE OR REPLACE FUNCTION pgqueue.complete(jobs json, wait boolean DEFAULT false) RETURNS SETOF bigint LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  r     record;
  steps json;
BEGIN
  IF complete.wait THEN
    PERFORM FROM json_to_recordset(complete.jobs) x(id bigint, lease bigint)
    CROSS JOIN LATERAL (SELECT FROM pgqueue.job j WHERE j.id = x.id AND j.lease = x.lease FOR UPDATE) j;
    -- A key that another job has taken meanwhile is as good as a lost lease: see seal in ledger.sql.
    PERFORM FROM json_to_recordset(complete.jobs) x(id bigint)
    CROSS JOIN LATERAL (SELECT j.id, j.name, j.idempotency_key FROM pgqueue.job j WHERE j.id = x.id OFFSET 0) j
    CROSS JOIN LATERAL (SELECT FROM pgqueue.effect e WHERE e.name = j.name AND e.key = j.idempotency_key AND e.job_id = j.id AND e.applied_at IS NULL FOR UPDATE) e;
    IF NOT FOUND AND EXISTS (
      SELECT FROM json_to_recordset(complete.jobs) x(id bigint) WHERE (SELECT j.idempotency_key FROM pgqueue.job j WHERE j.id = x.id) IS NOT NULL) THEN
      RETURN;
    END IF;
  END IF;
  FOR r IN
    WITH l AS MATERIALIZED (
      SELECT x.*, j.at FROM json_to_recordset(complete.jobs) x(id bigint, lease bigint, result json, problem text, steps json, skipped boolean)
      CROSS JOIN LATERAL (SELECT j.ctid AS at FROM pgqueue.job j WHERE j.id = x.id AND j.lease = x.lease FOR UPDATE SKIP LOCKED) j ORDER BY x.id),
    d AS (
      DELETE FROM pgqueue.job j USING l WHERE j.ctid = l.at
      RETURNING j.*, l.result, l.problem, l.steps, l.skipped, nullif(j.claimed_at, '-infinity') - greatest(j.enqueued_at, j.ready_at) AS wait),
    e AS (
      UPDATE pgqueue.effect e SET applied_at = clock_timestamp()
      FROM (SELECT e.at, d.id, d.lease FROM d CROSS JOIN LATERAL (
              SELECT e.ctid AS at FROM pgqueue.effect e WHERE e.name = d.name AND e.key = d.idempotency_key OFFSET 0) e) o
      WHERE e.ctid = o.at AND e.job_id = o.id AND e.lease = o.lease AND e.applied_at IS NULL),
    t AS (
      INSERT INTO pgqueue.tally (queue, name, outcome, n, wait_s)
      SELECT d.queue, d.name, 'ok', count(*), coalesce(extract(epoch FROM sum(d.wait)), 0) FROM d GROUP BY d.queue, d.name),
    p AS (DELETE FROM pgqueue.progress p WHERE p.job_id = ANY (ARRAY (SELECT d.id FROM d))),
    b AS (
      INSERT INTO pgqueue.batch_tally (batch_id, outcome, n)
      SELECT m.batch, 'done', count(*) FROM (SELECT pgqueue.batch_of(d.headers) AS batch FROM d WHERE d.headers IS NOT NULL) m WHERE m.batch IS NOT NULL GROUP BY m.batch),
    h AS (
      INSERT INTO pgqueue.job_history (id, until, outcome, name, queue, priority, key, attempt, enqueued_at, started_at, worker, headers, payload, result, problem)
      SELECT d.id, u.until, 'done', d.name, d.queue, d.priority, d.key, d.attempt, d.enqueued_at, d.claimed_at,
             (SELECT w.host || ':' || w.pid FROM pgqueue.worker w WHERE w.nonce = d.lease >> 32), d.headers, d.payload, d.result, d.problem
      FROM d JOIN pgqueue.job_type k ON k.name = d.name CROSS JOIN LATERAL (SELECT pgqueue.history_until(k.keep_s) AS until) u WHERE u.until IS NOT NULL)
    SELECT d.id, d.steps, CASE WHEN d.headers IS NOT NULL AND d.skipped IS NOT TRUE THEN pgqueue.json_at(d.headers, '{pgqueue,then}')::json END AS follow FROM d ORDER BY d.id
  LOOP
    FOREACH steps IN ARRAY ARRAY[r.follow, r.steps] LOOP
      CONTINUE WHEN json_typeof(steps) IS DISTINCT FROM 'array';
      PERFORM pgqueue.enqueue_step(s.value, r.id) FROM json_array_elements(steps) s;
    END LOOP;
    RETURN NEXT r.id;
  END LOOP;
END $$;
COMMENT ON COLUMN pgqueue.job_history.problem IS 'Why there is no result: the one returned could not be kept, or the job was skipped.';

-- Dedup keys ----------------------------------------------------------------------------------------------

-- A job that is cancelled before it ran frees its dedup key: nobody is to be given the id of work that is never done.
CREATE OR REPLACE FUNCTION pgqueue.cancel(ids bigint[]) RETURNS TABLE (id bigint, state text) LANGUAGE plpgsql AS $$
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
  k AS MATERIALIZED (
    SELECT f.queue, f.key FROM d JOIN pgqueue.dedup f ON f.queue = d.queue AND f.key = d.dedup_key AND f.job_id = d.id
    WHERE d.dedup_key IS NOT NULL AND d.attempt = 0 ORDER BY f.queue, f.key FOR UPDATE OF f),
  f AS (DELETE FROM pgqueue.dedup f USING k WHERE f.queue = k.queue AND f.key = k.key),
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

-- Retry budget --------------------------------------------------------------------------------------------

-- A retry that the budget has put off asks for it once more when its time has come. NULL, and so no byte, on all others.
ALTER TABLE pgqueue.job ADD COLUMN deferred boolean;

-- Enqueue -------------------------------------------------------------------------------------------------

-- The same rows are refused in half the time: of btrim and num_nonnulls each row made a new text or an array. A comparison
-- of bpchar is blind to blanks at the end.
ALTER TABLE pgqueue.job
  DROP CONSTRAINT job_queue_check, DROP CONSTRAINT job_name_check, DROP CONSTRAINT job_place,
  ADD CONSTRAINT job_queue_check CHECK (queue::bpchar <> '' AND octet_length(queue) <= 200),
  ADD CONSTRAINT job_name_check CHECK (name::bpchar <> '' AND octet_length(name) <= 200),
  ADD CONSTRAINT job_place CHECK ((pos IS NULL) <> (run_at IS NULL));

-- A bulk enqueue wakes once for all of its rows: for each, the trigger takes a third of the time of the insert.
CREATE OR REPLACE TRIGGER job_wake AFTER INSERT ON pgqueue.job FOR EACH ROW
  WHEN (NEW.run_at IS NULL AND current_setting('pgqueue.quiet', true) IS DISTINCT FROM 'on') EXECUTE FUNCTION pgqueue.job_wake();

-- A key that is there and free is locked before it is judged: by what was seen before a wait, two callers took it.
CREATE OR REPLACE FUNCTION pgqueue.enqueue_many(
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
  shed    boolean := false;
  due     timestamptz;
  problem text;
  r       record;
  jid     bigint;
  got     bigint;
  ids     bigint[] := '{}';
  made    boolean[] := '{}';
  altered boolean[] := '{}';
  bytes   int := octet_length(payloads::text);
  -- Most likely: what is as long as 20 jobs, or one so large that the rest is nothing beside it.
  many    boolean := bytes > 4096;
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
  IF problem IS NULL AND bytes > 1048576 THEN
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
    IF wait_s IS NOT NULL AND dedup_keys IS NOT NULL THEN
      -- A taken key adds no job, so it is answered; what would add one is shed one by one, or the call is refused as a whole.
      shed := kind.sheddable;
      IF shed OR NOT EXISTS (
        SELECT FROM unnest(dedup_keys) k WHERE NOT EXISTS (
          SELECT FROM pgqueue.dedup d WHERE d.queue = to_q AND d.key = k
            AND CASE WHEN d.until IS NULL THEN EXISTS (SELECT FROM pgqueue.job j WHERE j.id = d.job_id) ELSE d.until > clock_timestamp() END)) THEN
        wait_s := NULL;
      END IF;
    END IF;
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
    IF many THEN
      PERFORM set_config('pgqueue.quiet', 'on', true);
    END IF;
    RETURN QUERY
      INSERT INTO pgqueue.job AS j (name, queue, priority, pos, run_at, key, idempotency_key, max_attempts, timeout_s, backoff, expires_at, headers, payload)
      SELECT enqueue_many.name, to_q, to_prio, CASE WHEN due IS NULL THEN nextval('pgqueue.pos_seq') END, due,
             coalesce(p.key, CASE WHEN kind.slots IS NOT NULL THEN '@' || enqueue_many.name END), p.idem,
             enqueue_many.max_attempts, enqueue_many.timeout_s, enqueue_many.backoff, enqueue_many.expires_at, coalesce(p.headers, enqueue_many.headers), p.value
      FROM ROWS FROM (json_array_elements(payloads), unnest(keys), unnest(idempotency_keys), unnest(headers_each)) AS p(value, key, idem, headers)
      RETURNING j.id, true, false;  -- in the order of the payloads: a scan of functions keeps it
    IF many THEN
      IF FOUND AND due IS NULL THEN
        PERFORM pgqueue.wake(to_q);
      END IF;
      PERFORM set_config('pgqueue.quiet', 'off', true);
    END IF;
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
      IF shed THEN
        ids[r.n] := 0; made[r.n] := false; altered[r.n] := false;
        EXIT;
      END IF;
      jid := coalesce(jid, nextval(pg_get_serial_sequence('pgqueue.job', 'id')));
      INSERT INTO pgqueue.dedup (queue, key, job_id, until)
      VALUES (to_q, r.dedup, jid, CASE WHEN NOT dedup_live THEN clock_timestamp() + dedup_window END) ON CONFLICT DO NOTHING;
      IF NOT FOUND THEN
        -- A statement of its own: what the next one judges by is seen after the wait for whoever else takes the key.
        PERFORM FROM pgqueue.dedup d WHERE d.queue = to_q AND d.key = r.dedup FOR NO KEY UPDATE;
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
  IF shed THEN
    INSERT INTO pgqueue.tally (queue, name, outcome, n) SELECT to_q, enqueue_many.name, 'shed', count(*) FROM unnest(ids) i WHERE i = 0 HAVING count(*) > 0;
  END IF;
  RETURN QUERY SELECT u.i, u.c, u.a FROM unnest(ids, made, altered) WITH ORDINALITY u(i, c, a, n) ORDER BY u.n;
END $$;

-- Schedules -----------------------------------------------------------------------------------------------

-- Reads the six fields as a worker does, then looks for a day: over the lengths that the months have, and the weekdays that
-- they can begin with. In days, 100 is the last of the month and 101 its last weekday; in weekdays, which count from Sunday,
-- 10 n stands for the n-th of the month and 90 for the last.
CREATE FUNCTION pgqueue.cron_problem(expr text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
  shown    text := left(expr, 40);
  parts    text[] := regexp_split_to_array(btrim(upper(expr COLLATE "C"), E' \t\n\r\f\x0b'), E'[ \t\n\r\f\x0b]+');
  labels   text[] := '{second,minute,hour,day-of-month,month,day-of-week}';
  lowest   int[] := '{0,0,0,1,1,0}';
  highest  int[] := '{59,59,23,31,12,7}';
  names    text[];
  days     int[] := '{}';
  months   int[] := '{}';
  weekdays int[] := '{}';
  hit    int[];
  term     text;
  m        text[];
BEGIN
  IF expr IS NULL OR expr !~ E'^[0-9A-Za-z*/,# \t\n\r\f\x0b-]+$' OR cardinality(parts) NOT IN (5, 6) OR length(expr) > 200 THEN
    RETURN format('%L is not minute hour day month weekday, with the second in front if you need it', shown);
  END IF;
  IF cardinality(parts) = 5 THEN
    parts := array_prepend('0', parts);
  END IF;
  FOR i IN 1 .. 6 LOOP
    names := CASE i WHEN 5 THEN '{JAN,FEB,MAR,APR,MAY,JUN,JUL,AUG,SEP,OCT,NOV,DEC}' WHEN 6 THEN '{SUN,MON,TUE,WED,THU,FRI,SAT}' ELSE '{}' END;
    FOREACH term IN ARRAY string_to_array(parts[i], ',') LOOP
      FOR n IN 1 .. cardinality(names) LOOP
        term := regexp_replace(term, '(^|-)' || names[n] || '(?![0-9A-Z])', '\1' || n - 1 + lowest[i], 'g');
      END LOOP;
      m := regexp_match(term, '^(?:(\*)|([0-9]+)(?:-([0-9]+))?)(?:/([0-9]+))?$');
      hit := CASE
        WHEN i = 4 AND term ~ '^LW?(/0*[1-9][0-9]*)?$' THEN ARRAY[CASE WHEN term ~ 'W' THEN 101 ELSE 100 END]
        WHEN i = 6 AND term ~ '^0*[0-7]L$' THEN ARRAY[90 + rtrim(term, 'L')::numeric::int % 7]
        WHEN i = 6 AND term ~ '^0*[0-7]#0*[1-5]$' THEN ARRAY[split_part(term, '#', 1)::numeric::int % 7 + 10 * split_part(term, '#', 2)::numeric::int]
        WHEN m[1] IS NOT NULL OR m[2]::numeric BETWEEN lowest[i] AND highest[i] AND coalesce(m[3]::numeric BETWEEN m[2]::numeric AND highest[i], true) THEN
          ARRAY(SELECT g FROM generate_series(
            CASE WHEN m[1] IS NULL THEN m[2]::numeric::int ELSE lowest[i] END,
            CASE WHEN m[1] IS NOT NULL OR m[4] IS NOT NULL AND coalesce(m[3]::numeric = m[2]::numeric, true) THEN highest[i] ELSE coalesce(m[3], m[2])::numeric::int END,
            greatest(least(coalesce(m[4], '1')::numeric, 100), 1)::int) g)
      END;
      IF hit IS NULL OR m[4]::numeric = 0 THEN
        RETURN format('%L: bad %s (out of range, or not understood)', shown, labels[i]);
      END IF;
      CASE i WHEN 4 THEN days := days || hit; WHEN 5 THEN months := months || hit; WHEN 6 THEN weekdays := weekdays || hit; ELSE NULL; END CASE;
    END LOOP;
  END LOOP;
  weekdays := ARRAY(SELECT CASE WHEN w = 7 THEN 0 ELSE w END FROM unnest(weekdays) w);
  IF EXISTS (
    SELECT FROM unnest(months) month
    CROSS JOIN LATERAL unnest(CASE WHEN month = 2 THEN '{28,29}' WHEN month IN (4, 6, 9, 11) THEN '{30}' ELSE '{31}' END::int[]) length
    CROSS JOIN generate_series(0, 6) first CROSS JOIN generate_series(1, length) day
    CROSS JOIN LATERAL (SELECT (first + day - 1) % 7 AS weekday, (first + length - 1) % 7 AS last) w
    CROSS JOIN LATERAL (
      SELECT day = ANY (days) OR day = length AND 100 = ANY (days)
               OR day = length - CASE w.last WHEN 0 THEN 2 WHEN 6 THEN 1 ELSE 0 END AND 101 = ANY (days) AS by_day,
             w.weekday = ANY (weekdays) OR day + 7 > length AND 90 + w.weekday = ANY (weekdays)
               OR (day + 6) / 7 * 10 + w.weekday = ANY (weekdays) AS by_weekday) x
    WHERE CASE WHEN starts_with(parts[4], '*') OR starts_with(parts[6], '*') THEN x.by_day AND x.by_weekday ELSE x.by_day OR x.by_weekday END) THEN
    RETURN NULL;
  END IF;
  RETURN CASE WHEN (SELECT min(d) FROM unnest(days) d) BETWEEN 30 AND 31 THEN format('%L: bad day-of-month (out of range, or in none of its months)', shown)
              ELSE format('%L never comes true', shown) END;
END $$;
COMMENT ON FUNCTION pgqueue.cron_problem IS 'What is wrong with a cron expression, as workers read it; NULL = nothing.';

CREATE OR REPLACE FUNCTION pgqueue.schedule_add(
  name text, expr text, job text, payload json DEFAULT 'null', zone text DEFAULT 'UTC', jitter interval DEFAULT '0',
  missed text DEFAULT 'once', cap int DEFAULT 10, source text DEFAULT 'operator')
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  problem text;
BEGIN
  problem := CASE
    WHEN btrim(coalesce(schedule_add.name, '')) = '' OR octet_length(schedule_add.name) > 200 THEN 'the name is blank or has more than 200 bytes'
    WHEN btrim(coalesce(schedule_add.job, '')) = '' OR octet_length(schedule_add.job) > 200 THEN 'the job name is blank or has more than 200 bytes'
    -- What the code defines was read by its worker, as its zone was.
    WHEN schedule_add.source = 'operator' OR schedule_add.expr IS NULL THEN pgqueue.cron_problem(schedule_add.expr)
  END;
  problem := coalesce(problem, CASE
    WHEN schedule_add.missed IS NULL OR schedule_add.missed NOT IN ('skip', 'once', 'all') THEN format('missed is %L, not skip, once or all', schedule_add.missed)
    WHEN schedule_add.cap IS NULL OR schedule_add.cap NOT BETWEEN 1 AND 1000 THEN format('cap is %s, not 1 to 1000', schedule_add.cap)
    WHEN jitter IS NULL OR jitter NOT BETWEEN interval '0' AND interval '1 day' THEN format('jitter is %s, not between 0 and a day', jitter)
    WHEN schedule_add.source = 'operator' AND NOT EXISTS (SELECT FROM pg_catalog.pg_timezone_names z WHERE z.name = schedule_add.zone)
      THEN format('%L is no time zone', schedule_add.zone)
    WHEN schedule_add.source = 'operator' AND EXISTS (SELECT FROM pgqueue.schedule s WHERE s.name = schedule_add.name AND s.source = 'code')
      THEN 'it is defined in code; change it there, or pause it'
  END);
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

-- The end: sections go above this line ---------------------------------------------------------------------

COMMENT ON TABLE pgqueue.alembic_version IS 'serves code from pgqueue_0001';
