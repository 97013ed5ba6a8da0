-- name: site_lock
SELECT record FROM site WHERE site = $1 FOR UPDATE

-- name: site_save
INSERT INTO site (site, record) VALUES ($1, $2) ON CONFLICT (site) DO UPDATE SET record = excluded.record

-- name: doubled_load
SELECT doubled FROM site WHERE site = $1

-- name: doubled_save
UPDATE site SET doubled = $2 WHERE site = $1

-- name: pools_lock
SELECT record, told_version, told_at FROM pool WHERE site = $1 ORDER BY pool FOR UPDATE

-- name: pool_save
INSERT INTO pool (site, pool, record, told_version, told_at) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (site, pool) DO UPDATE SET record = excluded.record, told_version = excluded.told_version, told_at = excluded.told_at

-- name: pools_untold
-- Rows that another transaction holds are told by it, or with the next beat.
SELECT record, told_version, told_at FROM pool WHERE told_version < (record ->> 'version')::bigint
ORDER BY site, pool LIMIT $1 FOR UPDATE SKIP LOCKED

-- name: revision_add
INSERT INTO profile_revision (site, pool, revision, profile, declared_by, declared_at, effective_at) VALUES ($1, $2, $3, $4, $5, $6, $7)

-- name: sites_find
SELECT record FROM site WHERE $1::text IS NULL OR site = $1 ORDER BY site

-- name: pools_find
SELECT record FROM pool WHERE $1::text IS NULL OR site = $1 ORDER BY site, pool

-- name: versions_lift
WITH sites AS (UPDATE site SET record = jsonb_set(record, '{version}', to_jsonb($1::bigint)) WHERE version < $1)
UPDATE pool SET record = jsonb_set(record, '{version}', to_jsonb($1::bigint)) WHERE version < $1

-- name: drill_versions_lift
UPDATE drill SET record = jsonb_set(record, '{version}', to_jsonb($1::bigint)) WHERE coalesce((record ->> 'version')::bigint, 1) < $1

-- name: drill_lock
SELECT record, report, evidence FROM drill WHERE drill = $1 FOR UPDATE

-- name: drill_save
INSERT INTO drill (drill, site, record, asked_at, report, evidence) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (drill) DO UPDATE SET record = excluded.record, report = excluded.report, evidence = excluded.evidence

-- name: drills_open
SELECT record, report, evidence FROM drill WHERE record ->> 'state' IN ('planned', 'cut', 'back') ORDER BY asked_at

-- name: drills_find
SELECT record FROM drill WHERE $1::text IS NULL OR site = $1 ORDER BY asked_at DESC LIMIT $2

-- name: drill_load
SELECT record, report, evidence FROM drill WHERE drill = $1

-- name: consent_load
SELECT consent FROM drill_consent WHERE site = $1

-- name: consent_save
INSERT INTO drill_consent (site, consent) VALUES ($1, $2) ON CONFLICT (site) DO UPDATE SET consent = excluded.consent

-- name: consents
SELECT site, consent FROM drill_consent WHERE $1::text IS NULL OR site = $1 ORDER BY site

-- name: decision_add
INSERT INTO pool_decision (site, pool, number, row, at)
SELECT $1, $2, coalesce(max(number), 0) + 1, $3, $4 FROM pool_decision WHERE site = $1 AND pool = $2

-- name: decisions_find
SELECT number, row FROM pool_decision WHERE site = $1 AND pool = $2 ORDER BY number DESC LIMIT $3

-- name: call_offerings_lock
SELECT record FROM call_offering WHERE site = $1 ORDER BY name FOR UPDATE

-- name: call_offerings_find
SELECT record FROM call_offering WHERE ($1::text IS NULL OR site = $1) AND ($2::text IS NULL OR name = $2) ORDER BY site, name

-- name: call_offering_save
INSERT INTO call_offering (site, name, record) VALUES ($1, $2, $3) ON CONFLICT (site, name) DO UPDATE SET record = excluded.record

-- name: call_offering_revision_add
INSERT INTO call_offering_revision (site, name, revision, offering, told_at) VALUES ($1, $2, $3, $4, $5)

-- name: call_offering_versions_lift
UPDATE call_offering SET record = jsonb_set(record, '{version}', to_jsonb($1::bigint)) WHERE version < $1

-- name: probe_add
INSERT INTO probe (site, pool, probe, report, sealed, received_at) VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING

-- name: probes_trim
DELETE FROM probe WHERE site = $1 AND pool = $2 AND probe NOT IN (
    SELECT probe FROM probe WHERE site = $1 AND pool = $2 ORDER BY received_at DESC LIMIT $3)

-- name: probes_find
SELECT report FROM probe WHERE site = $1 AND pool = $2 ORDER BY received_at DESC, probe DESC LIMIT $3

-- name: probe_passed
SELECT report, received_at FROM probe WHERE site = $1 AND pool = $2 AND report ->> 'outcome' = 'passed' ORDER BY received_at DESC LIMIT 1

-- name: drift_load
SELECT drift FROM drift WHERE site = $1 AND pool = $2

-- name: drift_save
INSERT INTO drift (site, pool, drift, at) VALUES ($1, $2, $3, $4) ON CONFLICT (site, pool) DO UPDATE SET drift = excluded.drift, at = excluded.at
