-- name: settings
-- Statements are prepared while tables may be empty: a sequential or bitmap scan chosen then would be kept when they
-- hold millions of rows, so only index plans are left; and one plan does for all parameters: making a claim's anew takes
-- six times as long as running it for one job. Time-outs end what a broken network or a bug would hold for ever.
SELECT pg_catalog.set_config('enable_seqscan', 'off', false), pg_catalog.set_config('enable_bitmapscan', 'off', false),
  pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', false),
  pg_catalog.set_config('default_transaction_isolation', 'read committed', false),
  pg_catalog.set_config('default_transaction_read_only', 'off', false),
  pg_catalog.set_config('jit', 'off', false), pg_catalog.set_config('DateStyle', 'ISO', false),
  pg_catalog.set_config('statement_timeout', '60s', false),
  pg_catalog.set_config('idle_in_transaction_session_timeout', '60s', false),
  pg_catalog.set_config('search_path', '', false)
