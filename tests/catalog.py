"""What a database has in schema pgqueue, as text that two databases can be compared by."""

from __future__ import annotations

import psycopg

LISTING = """
SELECT 'schema ' || n.nspname || ' ' || coalesce(obj_description(n.oid, 'pg_namespace'), '')
FROM pg_namespace n WHERE n.nspname = 'pgqueue'
UNION ALL
SELECT format('relation %s %s %s %s %s %s', c.relkind, c.relname, c.reloptions, c.relacl, c.relpersistence,
              obj_description(c.oid, 'pg_class'))
FROM pg_class c WHERE c.relnamespace = to_regnamespace('pgqueue') AND c.relkind <> 'i'
UNION ALL
SELECT format('column %s.%s %s %s notnull=%s identity=%s generated=%s default=%s collation=%s %s', c.relname,
              a.attname, row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum),
              format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
              a.attgenerated, pg_get_expr(d.adbin, d.adrelid), a.attcollation::regcollation,
              col_description(c.oid, a.attnum))
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE c.relnamespace = to_regnamespace('pgqueue') AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind <> 'S'
UNION ALL
SELECT format('constraint %s %s %s', x.conrelid::regclass, x.conname, pg_get_constraintdef(x.oid))
FROM pg_constraint x WHERE x.connamespace = to_regnamespace('pgqueue')
UNION ALL
SELECT format('index %s', pg_get_indexdef(c.oid))
FROM pg_class c WHERE c.relnamespace = to_regnamespace('pgqueue') AND c.relkind = 'i'
UNION ALL
SELECT format('sequence %s %s', s.seqrelid::regclass, to_jsonb(s) - 'seqrelid')
FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid WHERE c.relnamespace = to_regnamespace('pgqueue')
UNION ALL
SELECT format('view %s %s', c.relname, pg_get_viewdef(c.oid))
FROM pg_class c WHERE c.relnamespace = to_regnamespace('pgqueue') AND c.relkind = 'v'
UNION ALL
SELECT format('function %s %s %s', pg_get_functiondef(p.oid), p.proacl, obj_description(p.oid, 'pg_proc'))
FROM pg_proc p WHERE p.pronamespace = to_regnamespace('pgqueue')
UNION ALL
SELECT format('trigger %s', pg_get_triggerdef(t.oid))
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE c.relnamespace = to_regnamespace('pgqueue') AND NOT t.tgisinternal
UNION ALL
SELECT format('type %s', t.typname)
FROM pg_type t WHERE t.typnamespace = to_regnamespace('pgqueue') AND t.typtype IN ('e', 'd')
ORDER BY 1
"""


def catalog(dsn: str) -> list[str]:
    """List every object of schema pgqueue with all that defines it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET search_path = ''")
        return [str(row[0]) for row in connection.execute(LISTING)]
