-- name: job_insert
-- Of this epoch, unless it is adopted from an offer of another.
INSERT INTO job (job, tenant, submitted_by, spec, client_key, content, state, submitted_at, queued_at, traceparent, version, epoch)
SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, CASE WHEN $12::bigint > 0 THEN $12::bigint ELSE epoch END FROM service_epoch
ON CONFLICT (tenant, client_key) DO NOTHING

-- name: job_by_key
SELECT * FROM job WHERE tenant = $1 AND client_key = $2

-- name: env_insert
INSERT INTO job_env (job, env) VALUES ($1, $2)

-- name: env_forget
DELETE FROM job_env WHERE job = $1

-- name: job_load
-- Scoped: everything ($2), or the caller's tenant ($3), or the caller's site ($4).
SELECT j.*, CASE WHEN j.state = 'queued'
    THEN (SELECT count(*) FROM job q WHERE q.state = 'queued' AND (q.queued_at, q.job) <= (j.queued_at, j.job)) ELSE 0 END AS position
FROM job j
WHERE j.job = $1 AND ($2::boolean OR j.tenant = $3 OR j.site = $4)

-- name: job_lock
SELECT * FROM job
WHERE job = $1 AND ($2::boolean OR tenant = $3 OR site = $4)
FOR UPDATE

-- name: jobs_list
SELECT j.*, CASE WHEN j.state = 'queued'
    THEN (SELECT count(*) FROM job q WHERE q.state = 'queued' AND (q.queued_at, q.job) <= (j.queued_at, j.job)) ELSE 0 END AS position
FROM job j
WHERE ($1::boolean OR j.tenant = $2 OR j.site = $3)
  AND ($4::text IS NULL OR j.tenant = $4) AND ($5::text IS NULL OR j.site = $5)
  AND (cardinality($6::text[]) = 0 OR j.state = ANY($6)) AND ($7::text IS NULL OR j.job < $7)
ORDER BY j.job DESC
LIMIT $8

-- name: job_versions_lift
UPDATE job SET version = $2 WHERE epoch < $1 AND version < $2

-- name: attempt_versions_lift
UPDATE attempt SET version = $2, record = jsonb_set(record, '{version}', to_jsonb($2::bigint)) WHERE epoch < $1 AND version < $2

-- name: job_update
UPDATE job SET state = $2, queued_at = $3, ended_at = $4, cancel_at = $5, cancel_by = $6, cancel_reason = $7, ending = $8, failures = $9,
    attempts = $10, generation = $11, site = $12, survivor = $14, delivered = $15, version = $13
WHERE job = $1 AND version = $13::bigint - 1
    -- who survives and whose result it is: each is written once
    AND (survivor IS NULL OR survivor = $14) AND (delivered IS NULL OR delivered = $15)

-- name: attempts_of_jobs
-- All that ran or hold something, and the last $2 of the others.
SELECT job, record FROM (
    SELECT job, record, state, epoch, generation, row_number() OVER (
        PARTITION BY job, state IN ('offered', 'claimed', 'staging', 'running', 'ended', 'lost') ORDER BY epoch DESC, generation DESC) AS age
    FROM attempt WHERE job = ANY($1::text[])
) a
WHERE state IN ('offered', 'claimed', 'staging', 'running', 'ended', 'lost') OR age <= $2
ORDER BY job, epoch, generation

-- name: verdicts_of_jobs
SELECT DISTINCT ON (job) job, round, reason, text, since, rejections FROM verdict WHERE job = ANY($1::text[]) ORDER BY job, id DESC

-- name: attempt_live_of_job
SELECT * FROM attempt WHERE job = $1 AND live

-- name: attempt_job
SELECT job FROM attempt WHERE attempt = $1

-- name: attempt_load
SELECT * FROM attempt WHERE attempt = $1

-- name: attempts_beside
-- Others of the job that run, have ended by themselves, or are not known to have ended.
SELECT * FROM attempt
WHERE job = $1 AND ($2::text IS NULL OR attempt <> $2) AND state IN ('offered', 'claimed', 'staging', 'running', 'ended', 'lost')
ORDER BY epoch, generation

-- name: attempts_open_at
SELECT attempt FROM attempt WHERE site = $1 AND state IN ('claimed', 'staging', 'running', 'lost') ORDER BY attempt

-- name: job_is_here
SELECT job FROM job WHERE job = $1

-- name: attempt_insert
INSERT INTO attempt (attempt, job, tenant, site, pool, kind, state, generation, epoch, wall_s, live, result_pending, stop_answer,
    withdrawal_seen, owed, counted, quantity, offered_at, record, version, holding, stop_cause, stop_why, lease_s, journal)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25)

-- name: attempt_update
UPDATE attempt SET state = $2, live = $3, result_pending = $4, stop_answer = $5, withdrawal_seen = $6, owed = $7, counted = $8, quantity = $9,
    record = $10, version = $11, holding = $12, stop_cause = $13, stop_why = $14, journal = $15
WHERE attempt = $1 AND version = $11::bigint - 1

-- name: attempt_owed_set
UPDATE attempt SET owed = $2 WHERE attempt = $1 AND owed <> $2

-- name: devices_hold
INSERT INTO attempt_device (attempt, site, pool, device, live) SELECT $1, $2, $3, device, true FROM unnest($4::text[]) AS device

-- name: devices_hold_free_ones
-- What a site already holds is recorded, whoever was thought to hold its devices: the first holder keeps them here.
INSERT INTO attempt_device (attempt, site, pool, device, live)
SELECT $1, $2, $3, device, NOT EXISTS (SELECT FROM attempt_device h WHERE h.site = $2 AND h.pool = $3 AND h.device = d.device AND h.live)
FROM unnest($4::text[]) AS d (device)

-- name: devices_free
UPDATE attempt_device SET live = false WHERE attempt = $1 AND live

-- name: instruction_next
INSERT INTO instruction_head (site, epoch, number) SELECT $1, epoch, 1 FROM service_epoch
ON CONFLICT (site, epoch) DO UPDATE SET number = instruction_head.number + 1
RETURNING epoch, number

-- name: instruction_insert
INSERT INTO instruction (attempt, kind, site, epoch, number) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (attempt, kind) DO NOTHING

-- name: orders_settled
-- What the site has on disk of settling needs no repeat.
UPDATE attempt a SET owed = false
FROM instruction i
WHERE a.site = $1 AND a.owed AND a.state IN ('ended', 'not_started') AND NOT a.result_pending
  AND i.attempt = a.attempt AND i.kind = 'settle' AND (i.epoch, i.number) <= ($2::bigint, $3::bigint)

-- name: orders_open
SELECT i.kind AS order_kind, i.epoch AS order_epoch, i.number AS order_number, a.attempt
FROM attempt a JOIN instruction i USING (attempt)
WHERE a.site = $1 AND a.owed
ORDER BY i.epoch, i.number

-- name: sites_owed
-- Of many sites at once, each by the small index of what is owed.
SELECT n.site FROM unnest($1::text[]) AS n (site) WHERE EXISTS (SELECT 1 FROM attempt a WHERE a.site = n.site AND a.owed)

-- name: attempts_load
SELECT * FROM attempt WHERE attempt = ANY($1::text[])

-- name: jobs_load
SELECT * FROM job WHERE job = ANY($1::text[])

-- name: envs_load
SELECT job, env FROM job_env WHERE job = ANY($1::text[])

-- name: story_insert
INSERT INTO story (job, line) VALUES ($1, $2)

-- name: story_load
-- The last $5 lines, in order.
SELECT line FROM (
    SELECT s.id, s.line FROM story s JOIN job j USING (job)
    WHERE s.job = $1 AND ($2::boolean OR j.tenant = $3 OR j.site = $4)
    ORDER BY s.id DESC
    LIMIT $5
) newest ORDER BY id

-- name: queue_load
SELECT * FROM job WHERE state = 'queued' AND cancel_at IS NULL ORDER BY queued_at, job LIMIT $1

-- name: live_load
SELECT * FROM attempt WHERE live OR holding ORDER BY attempt

-- name: used_load
SELECT a.tenant, a.site, a.pool, a.kind, sum(a.quantity)::bigint AS quantity
FROM attempt a JOIN unnest($1::text[], $2::timestamptz[]) AS w (tenant, since) ON w.tenant = a.tenant AND a.offered_at >= w.since
WHERE a.counted
GROUP BY 1, 2, 3, 4
ORDER BY 1, 2, 3, 4

-- name: back_offs_load
SELECT site, faults, until_at, why FROM back_off ORDER BY site

-- name: back_off_lock
SELECT site, faults, until_at, why FROM back_off WHERE site = $1 FOR UPDATE

-- name: back_off_set
INSERT INTO back_off (site, faults, until_at, why) VALUES ($1, $2, $3, $4)
ON CONFLICT (site) DO UPDATE SET faults = EXCLUDED.faults, until_at = EXCLUDED.until_at, why = EXCLUDED.why

-- name: back_off_clear
DELETE FROM back_off WHERE site = $1

-- name: avoids_load
SELECT job, site, faults, until_at, why FROM avoid WHERE job = ANY($1::text[]) ORDER BY job, site

-- name: avoid_load
SELECT site, faults, until_at, why FROM avoid WHERE job = $1 AND site = $2

-- name: avoid_set
INSERT INTO avoid (job, site, faults, until_at, why) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (job, site) DO UPDATE SET faults = EXCLUDED.faults, until_at = EXCLUDED.until_at, why = EXCLUDED.why

-- name: avoids_forget
DELETE FROM avoid WHERE job = $1

-- name: grants_load
SELECT * FROM islanded_grant ORDER BY site, tenant, kind

-- name: grants_lock
-- One setting of a site's at a time: the bound on their number is looked at under this lock.
SELECT pg_advisory_xact_lock(hashtextextended('islanded_grant/' || $1, 0))

-- name: grant_set
INSERT INTO islanded_grant (site, tenant, kind, devices, card_hours, valid_until, set_by, revision, spec, spec_revision)
VALUES ($1, $2, $3, $4, $5, $6, $7, 1, $8, $9)
ON CONFLICT (site, tenant, kind) DO UPDATE SET devices = EXCLUDED.devices, card_hours = EXCLUDED.card_hours, valid_until = EXCLUDED.valid_until,
    set_by = EXCLUDED.set_by, revision = islanded_grant.revision + 1, spec = EXCLUDED.spec, spec_revision = EXCLUDED.spec_revision

-- name: grants_let_go
UPDATE islanded_grant SET devices = 0, revision = revision + 1 WHERE site = $1 AND devices > 0 AND valid_until <= $2

-- name: round_insert
INSERT INTO round (round, at, input, leader_epoch, leader_number, queued, placed, not_examined) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)

-- name: rounds_prune
DELETE FROM round WHERE round IN (SELECT round FROM round WHERE at < $1 ORDER BY at LIMIT 200)

-- name: verdict_insert
INSERT INTO verdict (job, round, reason, text, since, rejections) VALUES ($1, $2, $3, $4, $5, $6)

-- name: verdict_mark
UPDATE job SET wait_digest = $2, wait_reason = $3, wait_since = $4 WHERE job = $1

-- name: verdicts_prune
DELETE FROM verdict v USING (
    SELECT id, row_number() OVER (PARTITION BY job ORDER BY id DESC) AS age FROM verdict WHERE job = ANY($1::text[])
) old WHERE v.id = old.id AND old.age > $2

-- name: attempts_page
SELECT record, wall_s FROM attempt WHERE $1::text IS NULL OR attempt > $1 ORDER BY attempt LIMIT $2

-- name: quotas_load
SELECT tenant, site, kind, maximum FROM quota ORDER BY tenant, site, kind

-- name: quota_set
INSERT INTO quota (tenant, site, kind, maximum) VALUES ($1, $2, $3, $4) ON CONFLICT (tenant, site, kind) DO UPDATE SET maximum = EXCLUDED.maximum

-- name: quota_remove
DELETE FROM quota WHERE tenant = $1 AND site = $2 AND kind = $3

-- name: known_upsert
INSERT INTO known (noun, entity, version, body, at) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (noun, entity) DO UPDATE SET version = EXCLUDED.version, body = EXCLUDED.body, at = EXCLUDED.at
WHERE known.version < EXCLUDED.version

-- name: known_load
SELECT noun, entity, version, body, at FROM known ORDER BY noun, entity

-- name: settings_lock
INSERT INTO site_settings (site, revision, content, known, made_at) VALUES ($1, 1, $2, $3, $4) ON CONFLICT (site) DO NOTHING

-- name: settings_load
SELECT revision, content, known, made_at FROM site_settings WHERE site = $1 FOR UPDATE

-- name: settings_next
UPDATE site_settings SET revision = $2, content = $3, known = $4, made_at = $5 WHERE site = $1
