-- name: key_lock
-- Reports of one key take turns, also while nothing is open yet.
SELECT pg_advisory_xact_lock(hashtextextended('incident:' || $1, 0))

-- name: incident_open
SELECT record FROM incident WHERE key = $1 AND state <> 'closed' FOR UPDATE

-- name: incident_load
SELECT record FROM incident WHERE incident = $1

-- name: incident_lock
SELECT record FROM incident WHERE incident = $1 FOR UPDATE

-- name: incident_save
INSERT INTO incident (incident, record) VALUES ($1, $2) ON CONFLICT (incident) DO UPDATE SET record = excluded.record

-- name: versions_lift
UPDATE incident SET record = jsonb_set(record, '{version}', to_jsonb($1::bigint)) WHERE version < $1

-- name: incident_list
-- Newest first: ids sort by their making.
SELECT record FROM incident
WHERE ($1::text IS NULL OR state = $1) AND ($2::text IS NULL OR site = $2)
    AND ($3::boolean OR tenant = $4::text OR site = $5::text)
ORDER BY incident DESC LIMIT $6

-- name: site_apply
-- Nothing is touched unless the version is higher than the one held.
INSERT INTO site_view AS v (site, version, record) VALUES ($1, $2, $3)
ON CONFLICT (site) DO UPDATE SET version = excluded.version, record = excluded.record WHERE v.version < excluded.version

-- name: site_load
SELECT record FROM site_view WHERE site = $1

-- name: pool_apply
INSERT INTO pool_view AS v (site, pool, version, phase) VALUES ($1, $2, $3, $4)
ON CONFLICT (site, pool) DO UPDATE SET version = excluded.version, phase = excluded.phase WHERE v.version < excluded.version

-- name: pool_phases
SELECT phase FROM pool_view WHERE site = $1 ORDER BY pool
