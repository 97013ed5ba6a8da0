-- name: attempts_load
SELECT attempt, revision, snapshot, priced_spec, priced_revision, settled_version, settled_amount, settled_currency, settled_payer,
       settled_segments, settled_quantity, tenant, site, until
FROM attempt WHERE attempt = any($1::text[])

-- name: segments_load
-- With the open reason of those that wait, in order of arrival.
SELECT s.number, s.attempt, s.site, s.journal, s.seq, s.digest, s.payload, s.signer, s.signature, s.received_at, s.proven, s.tenant,
       coalesce(w.reason, '') AS suspense
FROM segment AS s LEFT JOIN suspense AS w ON w.segment = s.number AND w.released_at IS NULL
WHERE s.attempt = any($1::text[]) ORDER BY s.number

-- name: balances_load
SELECT e.attempt, p.account, p.currency, sum(p.amount) AS amount
FROM entry AS e JOIN posting AS p ON p.entry = e.id
WHERE e.attempt = any($1::text[]) GROUP BY e.attempt, p.account, p.currency HAVING sum(p.amount) <> 0

-- name: specs_for
-- Revisions that might price usage of these tenants.
SELECT record FROM spec_revision WHERE provider = 'platform' AND (consumer = '*' OR consumer = any($1::text[])) ORDER BY spec, revision

-- name: keys_for
SELECT site, key, revoked FROM site_key WHERE site = any($1::text[])

-- name: lanes_through
-- Received, and a moment later interpreted or in quarantine.
SELECT site, ack_through FROM lane_site WHERE lane = 'metering' AND site = any($1::text[])

-- name: attempt_insert
INSERT INTO attempt (attempt, revision, tenant, job, site, state, version, snapshot, since, until, complete, priced_spec, priced_revision,
                     settled_version, settled_amount, settled_currency, settled_payer, settled_segments, settled_quantity)
VALUES ($1, $2::bigint + 1, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
ON CONFLICT (attempt) DO NOTHING

-- name: attempt_update
-- Only what was decided on this revision.
UPDATE attempt SET revision = $2::bigint + 1, tenant = $3, job = $4, site = $5, state = $6, version = $7, snapshot = $8, since = $9, until = $10,
    complete = $11, priced_spec = $12, priced_revision = $13, settled_version = $14, settled_amount = $15, settled_currency = $16,
    settled_payer = $17, settled_segments = $18, settled_quantity = $19, changed_at = now()
WHERE attempt = $1 AND revision = $2::bigint

-- name: segment_insert
INSERT INTO segment (id, digest, site, attempt, journal, seq, phase, device_kind, model, quantity_milli, starts_at, ends_at, payload, signer,
                     signature, received_at, proven, tenant)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18) RETURNING number

-- name: segment_judged
UPDATE segment SET proven = $2, tenant = $3 WHERE number = $1

-- name: suspense_release
-- Close the open reason, unless it is this one.
UPDATE suspense SET released_at = now() WHERE segment = $1 AND released_at IS NULL AND reason <> $2

-- name: suspense_open
INSERT INTO suspense (segment, attempt, reason) VALUES ($1, $2, $3) ON CONFLICT (segment) WHERE released_at IS NULL DO NOTHING

-- name: entry_insert
INSERT INTO entry (attempt, kind, reason, spec, spec_revision, charges, cites) VALUES ($1, $2, $3, $4, $5, $6, $7) RETURNING id

-- name: postings_insert
INSERT INTO posting (entry, account, currency, amount)
SELECT $1, * FROM unnest($2::text[], $3::text[], $4::numeric[])

-- name: versions_load
SELECT attempt, version FROM attempt WHERE attempt = any($1::text[]) AND snapshot IS NOT NULL

-- name: attempts_of_tenant
SELECT attempt FROM attempt
WHERE tenant = $1 AND since < $3 AND (until IS NULL OR until >= $2) AND attempt > $4 ORDER BY attempt LIMIT $5

-- name: attempts_every
SELECT attempt FROM attempt WHERE attempt > $1 ORDER BY attempt LIMIT $2

-- name: attempts_waiting
SELECT DISTINCT attempt FROM suspense WHERE released_at IS NULL AND reason = any($1::text[]) AND attempt > $2 ORDER BY attempt LIMIT $3

-- name: specs_of
SELECT record FROM spec_revision WHERE $1 = '' OR provider = $1 OR consumer = $1 OR consumer = '*' ORDER BY agreed_at, spec, revision

-- name: spec_insert
INSERT INTO spec_revision (spec, revision, provider, consumer, currency, effective_from, record) VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT DO NOTHING

-- name: allowance_put
INSERT INTO allowance AS a (tenant, version, record) VALUES ($1, $3, $2)
ON CONFLICT (tenant) DO UPDATE SET version = a.version + 1, record = excluded.record
RETURNING version

-- name: allowance_versions_lift
UPDATE allowance SET version = $1 WHERE version < $1

-- name: allowances_load
SELECT tenant, version, record FROM allowance ORDER BY tenant

-- name: key_put
-- Only a newer word on the site's keys counts; whether it did is the number of rows.
INSERT INTO site_key AS k (site, key, revoked, version)
SELECT $1, $2, $3, $4 WHERE NOT EXISTS (SELECT 1 FROM site_key WHERE site = $1 AND version >= $4)
ON CONFLICT (site, key) DO UPDATE SET revoked = excluded.revoked, version = excluded.version WHERE k.version < excluded.version

-- name: name_put
INSERT INTO job_name AS n (job, name, version) VALUES ($1, $2, $3)
ON CONFLICT (job) DO UPDATE SET name = excluded.name, version = excluded.version WHERE n.version < excluded.version

-- name: names_load
SELECT job, name FROM job_name WHERE job = any($1::text[])

-- name: totals
SELECT (SELECT count(*) FROM posting) AS postings,
       (SELECT coalesce(sum(amount), 0) FROM posting) AS sum,
       (SELECT count(*) FROM quarantine WHERE lane = 'metering' AND released_at IS NULL) AS quarantined,
       (SELECT count(*) FROM suspense WHERE released_at IS NULL AND reason NOT IN ('superseded', 'said_again')) AS suspense

-- name: decisions_load
SELECT d.segment, d.lifts, d.who, d.why, d.at FROM suspense_decision AS d JOIN segment AS s ON s.number = d.segment
WHERE s.attempt = any($1::text[]) ORDER BY d.id

-- name: decision_insert
INSERT INTO suspense_decision (segment, lifts, who, why, at) VALUES ($1, $2, $3, $4, $5)

-- name: entries_last
SELECT attempt, max(id) AS id FROM entry WHERE attempt = any($1::text[]) GROUP BY attempt

-- name: journals_replaced
SELECT site, journal FROM journal_opened WHERE previous IS NOT NULL AND site = any($1::text[])

-- name: journal_insert
INSERT INTO journal_opened (site, journal, previous, why, said_at) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING

-- name: lost_insert
INSERT INTO lost_range (site, journal, first, last, payload, signer, signature, said_at, proven) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
ON CONFLICT DO NOTHING

-- name: lost_load
-- Newest first; null for every site.
SELECT site, journal, first, last, said_at, proven FROM lost_range WHERE $1::text[] IS NULL OR site = any($1::text[])
ORDER BY said_at DESC, site, journal, first LIMIT $2

-- name: period_insert
INSERT INTO period_told (site, period, starts_at, ends_at, attempts, segments, quantity_milli_us, digest, payload, signer, signature,
                         received_at, proven)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) ON CONFLICT DO NOTHING

-- name: period_proven
UPDATE period_told SET proven = true WHERE number = $1

-- name: periods_unproven
-- The last word of each site on each period: whoever says many waits for himself.
SELECT number, digest, payload, signer, signature, received_at, proven
FROM (SELECT DISTINCT ON (site, period) * FROM period_told WHERE NOT proven ORDER BY site, period, number DESC) AS last ORDER BY number LIMIT $1

-- name: periods_load
-- Newest first; of one site, of one period or all.
SELECT number, digest, payload, signer, signature, received_at, proven FROM period_told
WHERE site = $1 AND ($2::text IS NULL OR period = $2) ORDER BY period DESC, site, number DESC LIMIT $3

-- name: periods_last
-- Newest first, the last word of each site on each period: whoever says many pushes nobody out.
SELECT number, digest, payload, signer, signature, received_at, proven
FROM (SELECT DISTINCT ON (site, period) * FROM period_told ORDER BY site, period, proven DESC, number DESC) AS last
ORDER BY period DESC, site LIMIT $1

-- name: held_of_site
-- Each segment id once, as it came first; a segment that ends at the border is of the period that ends there.
SELECT count(DISTINCT attempt) AS attempts, count(*) AS segments,
       coalesce(sum(quantity_milli * greatest(0, extract(epoch FROM ends_at - starts_at) * 1000000)), 0)::numeric AS quantity
FROM (SELECT DISTINCT ON (id) id, attempt, quantity_milli, starts_at, ends_at FROM segment
      WHERE site = $1 AND ends_at > $2 AND ends_at <= $3 ORDER BY id, number) AS one

-- name: suspended
-- What waits, oldest first; of one site or all, of one segment id or all.
SELECT s.number, s.id, s.digest, s.site, s.attempt, s.tenant, s.starts_at, s.ends_at, s.quantity_milli, w.reason, w.since
FROM suspense AS w JOIN segment AS s ON s.number = w.segment
WHERE w.released_at IS NULL AND w.reason NOT IN ('superseded', 'said_again') AND ($1::text IS NULL OR s.site = $1) AND ($2::text IS NULL OR s.id = $2)
ORDER BY w.id LIMIT $3

-- name: calls_turn
-- One decider at a time for each call, also for one that is not here yet; in one order, so that two never wait for each other.
SELECT pg_advisory_xact_lock(k) FROM (SELECT hashtextextended(site || '/' || call, 0) AS k FROM unnest($1::text[], $2::text[]) AS c (site, call)
                                      ORDER BY 1) AS keys

-- name: calls_lock
SELECT c.* FROM call AS c JOIN unnest($1::text[], $2::text[]) AS k (site, call) USING (site, call) ORDER BY c.site, c.call FOR UPDATE OF c

-- name: call_balances
SELECT e.call_site, e.call, p.account, p.currency, sum(p.amount) AS amount, max(e.id) AS last
FROM entry AS e JOIN posting AS p ON p.entry = e.id
WHERE (e.call_site, e.call) IN (SELECT * FROM unnest($1::text[], $2::text[])) GROUP BY e.call_site, e.call, p.account, p.currency

-- name: call_save
INSERT INTO call (site, call, offering, tenant, at, day, payload, signer, signature, received_at, proven, seen, seen_at, state, reason, outcome,
                  payer, amount, currency, priced_spec, priced_revision, input_tokens, output_tokens, response_us, first_byte_us, kept, book)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27)
ON CONFLICT (site, call) DO UPDATE SET
    at = excluded.at, day = excluded.day, payload = excluded.payload, signer = excluded.signer, signature = excluded.signature,
    received_at = excluded.received_at, proven = excluded.proven, seen = excluded.seen, seen_at = excluded.seen_at, state = excluded.state,
    reason = excluded.reason, outcome = excluded.outcome, payer = excluded.payer, amount = excluded.amount, currency = excluded.currency,
    priced_spec = excluded.priced_spec, priced_revision = excluded.priced_revision, input_tokens = excluded.input_tokens,
    output_tokens = excluded.output_tokens, response_us = excluded.response_us, first_byte_us = excluded.first_byte_us, kept = excluded.kept,
    book = excluded.book, changed_at = now()

-- name: call_entry_insert
INSERT INTO entry (call_site, call, kind, reason, spec, spec_revision, charges, cites) VALUES ($1, $2, $3, $4, $5, $6, '[]', $7) RETURNING id

-- name: calls_open
SELECT site, call FROM call WHERE state <> 'settled' AND (site, call) > ($1, $2) ORDER BY site, call LIMIT $3

-- name: calls_find
SELECT book FROM call
WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR site = $2) AND ($3::text IS NULL OR offering = $3) AND ($4 = '' OR day = $4)
  AND ($5::text IS NULL OR call = $5) AND ($6 = '' OR state = $6) AND ($7 = '' OR call < $7)
ORDER BY call DESC LIMIT $8

-- name: calls_summed
SELECT site, offering, day, outcome, count(*) AS calls, count(*) FILTER (WHERE state <> 'settled') AS waiting,
       coalesce(sum(amount) FILTER (WHERE payer = 'tenant'), 0) AS amount,
       coalesce(sum(amount) FILTER (WHERE payer IN ('site', 'platform')), 0) AS others,
       coalesce(sum(input_tokens), 0)::bigint AS input_tokens, coalesce(sum(output_tokens), 0)::bigint AS output_tokens,
       count(*) FILTER (WHERE (input_tokens IS NULL OR output_tokens IS NULL) AND outcome <> 'refused') AS unknown
FROM call WHERE tenant = $1 AND at >= $2 AND at < $3 GROUP BY site, offering, day, outcome ORDER BY day, site, offering, outcome

-- name: calls_attained
SELECT count(*) AS calls, count(*) FILTER (WHERE outcome IN ('completed', 'incomplete', 'rejected', 'client_gone')) AS answered,
       count(*) FILTER (WHERE outcome IN ('upstream_failed', 'upstream_stalled', 'timed_out')) AS failed,
       count(*) FILTER (WHERE kept) AS kept, count(*) FILTER (WHERE NOT kept) AS missed, count(*) FILTER (WHERE reason = 'site_word') AS missing,
       percentile_disc(0.95) WITHIN GROUP (ORDER BY response_us) AS response_us,
       percentile_disc(0.95) WITHIN GROUP (ORDER BY first_byte_us) AS first_byte_us
FROM call WHERE site = $1 AND offering = $2 AND at >= $3 AND at < $4

-- name: calls_counted
SELECT count(*) FILTER (WHERE state <> 'settled') AS waiting,
       count(*) FILTER (WHERE coalesce(amount, 0) <> (SELECT coalesce(sum(-p.amount), 0) FROM entry AS e JOIN posting AS p ON p.entry = e.id
                        WHERE e.call_site = call.site AND e.call = call.call AND p.account LIKE 'usage/%')) AS differing
FROM call

-- name: native_insert
-- The same part said again changes nothing.
INSERT INTO native_day (site, cluster, day, read_at, part, payload, signer, signature, received_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT DO NOTHING

-- name: native_superseded
-- Readings of a day before the two newest: one of these may not be whole yet.
DELETE FROM native_day WHERE site = $1 AND cluster = $2 AND day = $3
AND read_at < (SELECT min(read_at) FROM (
    SELECT DISTINCT read_at FROM native_day WHERE site = $1 AND cluster = $2 AND day = $3 ORDER BY read_at DESC LIMIT 2) AS newest)

-- name: native_days
SELECT payload, signer, signature FROM native_day WHERE site = $1 AND day BETWEEN $2 AND $3 ORDER BY day, cluster, read_at, part

-- name: native_sites
SELECT DISTINCT site FROM native_day WHERE day BETWEEN $1 AND $2 ORDER BY site

-- name: attempts_of_site
SELECT attempt FROM attempt
WHERE site = $1 AND since < $3 AND (until IS NULL OR until >= $2) AND attempt > $4 ORDER BY attempt LIMIT $5

-- name: call_decisions
SELECT d.* FROM call_decision AS d JOIN unnest($1::text[], $2::text[]) AS k (site, call) USING (site, call)

-- name: call_decide
INSERT INTO call_decision (site, call, input_tokens, output_tokens, who, why, at)
SELECT $1, $2, $3, $4, $5, $6, $7 WHERE EXISTS (SELECT 1 FROM call WHERE site = $1 AND call = $2) ON CONFLICT DO NOTHING
