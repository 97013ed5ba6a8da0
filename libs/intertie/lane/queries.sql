-- name: lane_rows
-- Rows of some sites, locked; those that another transaction holds are skipped, not waited for. interpreted_through is computed: entries are
-- marked without touching this row, or each interpretation would block the site's next sync.
SELECT s.site, s.lane, s.session, s.journal, s.ack_through, s.digest, s.safe_through, s.heard, s.last_heard, s.last_nonce, s.taken_nonce,
    s.at_head, s.running, s.instruction_epoch, s.instruction_mark, s.settings_revision, s.clocks_utc, s.clocks_boot_s, s.clocks_kernel_boot,
    s.clock_offset_s, s.clock_error_s, s.place, s.moves, s.state, s.state_since, s.epoch_told, s.version,
    coalesce((SELECT min(e.seq) - 1 FROM lane_entry AS e
        WHERE e.site = s.site AND e.lane = s.lane AND e.journal = s.journal AND e.interpreted_at IS NULL), s.ack_through) AS interpreted_through,
    (SELECT count(*) FROM quarantine AS q WHERE q.site = s.site AND q.lane = s.lane AND q.released_at IS NULL) AS quarantined
FROM lane_site AS s WHERE s.lane = $1 AND s.site = any($2::text[])
FOR UPDATE OF s SKIP LOCKED

-- name: lane_rows_read
-- The same, not locked; null for every site of the lane.
SELECT s.site, s.lane, s.session, s.journal, s.ack_through, s.digest, s.safe_through, s.heard, s.last_heard, s.last_nonce, s.taken_nonce,
    s.at_head, s.running, s.instruction_epoch, s.instruction_mark, s.settings_revision, s.clocks_utc, s.clocks_boot_s, s.clocks_kernel_boot,
    s.clock_offset_s, s.clock_error_s, s.place, s.moves, s.state, s.state_since, s.epoch_told, s.version,
    coalesce((SELECT min(e.seq) - 1 FROM lane_entry AS e
        WHERE e.site = s.site AND e.lane = s.lane AND e.journal = s.journal AND e.interpreted_at IS NULL), s.ack_through) AS interpreted_through,
    (SELECT count(*) FROM quarantine AS q WHERE q.site = s.site AND q.lane = s.lane AND q.released_at IS NULL) AS quarantined
FROM lane_site AS s WHERE s.lane = $1 AND ($2::text IS NULL OR s.site = $2) ORDER BY s.site

-- name: lane_known
-- Which of these sites have a row, locked or not.
SELECT site FROM lane_site WHERE lane = $1 AND site = any($2::text[])

-- name: lane_digest
SELECT digest FROM lane_entry WHERE site = $1 AND lane = $2 AND journal = $3 AND seq = $4

-- name: lane_ends
SELECT journal, max(seq) AS seq FROM lane_entry WHERE site = $1 AND lane = $2 AND journal = any($3::text[]) GROUP BY journal

-- name: lane_rows_insert
-- Attempts travel as words of one text, since arrays of unequal arrays cannot be unnested.
INSERT INTO lane_site (lane, site, session, journal, ack_through, digest, safe_through, interpreted_through, heard, last_heard, last_nonce,
    taken_nonce, at_head, running, instruction_epoch, instruction_mark, settings_revision, clocks_utc, clocks_boot_s, clocks_kernel_boot,
    clock_offset_s, clock_error_s, place, moves, state, state_since, epoch_told, version)
SELECT $1, n.site, n.session, n.journal, n.ack_through, n.digest, n.safe_through, n.interpreted_through, n.heard, n.last_heard, n.last_nonce,
    n.taken_nonce, n.at_head, string_to_array(n.running, ' '), n.instruction_epoch, n.instruction_mark, n.settings_revision, n.clocks_utc,
    n.clocks_boot_s, n.clocks_kernel_boot, n.clock_offset_s, n.clock_error_s, n.place, string_to_array(n.moves, ' ')::timestamptz[],
    n.state, n.state_since, n.epoch_told, n.version
FROM unnest($2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::bigint[], $8::bigint[], $9::bigint[], $10::timestamptz[],
    $11::bigint[], $12::bigint[], $13::boolean[], $14::text[], $15::bigint[], $16::bigint[], $17::bigint[], $18::timestamptz[],
    $19::double precision[], $20::text[], $21::double precision[], $22::double precision[], $23::text[], $24::text[], $25::text[],
    $26::timestamptz[], $27::bigint[], $28::integer[])
    AS n (site, session, journal, ack_through, digest, safe_through, interpreted_through, heard, last_heard, last_nonce, taken_nonce, at_head,
    running, instruction_epoch, instruction_mark, settings_revision, clocks_utc, clocks_boot_s, clocks_kernel_boot, clock_offset_s,
    clock_error_s, place, moves, state, state_since, epoch_told, version)
ON CONFLICT (site, lane) DO NOTHING

-- name: lane_rows_update
-- All syncs of a group in one statement; the rows are locked by lane_rows.
UPDATE lane_site AS s SET session = n.session, journal = n.journal, ack_through = n.ack_through, digest = n.digest,
    safe_through = n.safe_through, interpreted_through = n.interpreted_through, heard = n.heard, last_heard = n.last_heard,
    last_nonce = n.last_nonce, taken_nonce = n.taken_nonce, at_head = n.at_head, running = string_to_array(n.running, ' '),
    instruction_epoch = n.instruction_epoch, instruction_mark = n.instruction_mark, settings_revision = n.settings_revision,
    clocks_utc = n.clocks_utc, clocks_boot_s = n.clocks_boot_s, clocks_kernel_boot = n.clocks_kernel_boot,
    clock_offset_s = n.clock_offset_s, clock_error_s = n.clock_error_s, place = n.place,
    moves = string_to_array(n.moves, ' ')::timestamptz[], state = n.state, state_since = n.state_since, epoch_told = n.epoch_told,
    version = n.version
FROM unnest($2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::bigint[], $8::bigint[], $9::bigint[], $10::timestamptz[],
    $11::bigint[], $12::bigint[], $13::boolean[], $14::text[], $15::bigint[], $16::bigint[], $17::bigint[], $18::timestamptz[],
    $19::double precision[], $20::text[], $21::double precision[], $22::double precision[], $23::text[], $24::text[], $25::text[],
    $26::timestamptz[], $27::bigint[], $28::integer[])
    AS n (site, session, journal, ack_through, digest, safe_through, interpreted_through, heard, last_heard, last_nonce, taken_nonce, at_head,
    running, instruction_epoch, instruction_mark, settings_revision, clocks_utc, clocks_boot_s, clocks_kernel_boot, clock_offset_s,
    clock_error_s, place, moves, state, state_since, epoch_told, version)
WHERE s.lane = $1 AND s.site = n.site

-- name: lane_beat
-- Idle syncs of a group, without reading the rows first: one that anybody wrote since, or holds now, is left out and judged as any other.
WITH free AS (SELECT site FROM lane_site WHERE lane = $1 AND site = any($2::text[]) FOR UPDATE SKIP LOCKED)
UPDATE lane_site AS s SET heard = n.heard, last_heard = n.last_heard, last_nonce = n.last_nonce, taken_nonce = n.taken_nonce,
    running = string_to_array(n.running, ' '), instruction_epoch = n.instruction_epoch, instruction_mark = n.instruction_mark,
    settings_revision = n.settings_revision, clocks_utc = n.clocks_utc, clocks_boot_s = n.clocks_boot_s, clock_offset_s = n.clock_offset_s,
    clock_error_s = n.clock_error_s, epoch_told = n.epoch_told
FROM unnest($2::text[], $3::text[], $4::text[], $5::bigint[], $6::bigint[], $7::bigint[], $8::timestamptz[], $9::bigint[], $10::bigint[],
    $11::text[], $12::bigint[], $13::bigint[], $14::bigint[], $15::timestamptz[], $16::double precision[], $17::double precision[],
    $18::double precision[], $19::bigint[])
    AS n (site, session, journal, heard_before, nonce_before, heard, last_heard, last_nonce, taken_nonce, running, instruction_epoch,
    instruction_mark, settings_revision, clocks_utc, clocks_boot_s, clock_offset_s, clock_error_s, epoch_told)
JOIN free ON free.site = n.site
WHERE s.lane = $1 AND s.site = n.site AND s.session = n.session AND s.journal = n.journal AND s.heard = n.heard_before
    AND s.last_nonce = n.nonce_before AND s.state = 'ok'
RETURNING s.site

-- name: lane_entries_insert
INSERT INTO lane_entry (lane, received_at, site, journal, seq, digest, raw)
SELECT $1, n.received_at, n.site, n.journal, n.seq, n.digest, n.raw
FROM unnest($2::timestamptz[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::bytea[]) AS n (received_at, site, journal, seq, digest, raw)

-- name: lane_open_sites
SELECT s.site FROM lane_site AS s WHERE s.lane = $1
    AND EXISTS (SELECT 1 FROM lane_entry AS e WHERE e.site = s.site AND e.lane = s.lane AND e.interpreted_at IS NULL)
ORDER BY s.site

-- name: lane_epoch_told
SELECT coalesce(max(epoch_told), 0) AS told FROM lane_site

-- name: lane_open_entries
-- What an earlier journal left open comes before the one that replaced it.
SELECT e.site, e.lane, e.journal, e.seq, e.digest, e.raw, e.received_at
FROM lane_entry AS e JOIN lane_site AS s ON s.site = e.site AND s.lane = e.lane
WHERE e.site = $1 AND e.lane = $2 AND e.interpreted_at IS NULL ORDER BY e.journal = s.journal, e.journal, e.seq LIMIT $3

-- name: lane_mark
-- Once, and in order: zero rows if it was marked, or if an earlier entry is open (also one that another transaction is about to mark).
UPDATE lane_entry AS e SET interpreted_at = now()
WHERE e.site = $1 AND e.lane = $2 AND e.journal = $3 AND e.seq = $4 AND e.interpreted_at IS NULL
    AND NOT EXISTS (SELECT 1 FROM lane_entry AS b
        WHERE b.site = $1 AND b.lane = $2 AND b.journal = $3 AND b.seq < $4 AND b.interpreted_at IS NULL)

-- name: lane_quarantine
-- Once more, if it was tried again and still cannot be interpreted.
INSERT INTO quarantine (site, lane, journal, seq, raw, error, at) VALUES ($1, $2, $3, $4, $5, $6, now())
ON CONFLICT (site, lane, journal, seq) DO UPDATE SET error = excluded.error, at = excluded.at, released_at = NULL

-- name: lane_read_again
-- What was set aside with one code stands open again as if it had just come.
WITH chosen AS (
    UPDATE quarantine AS q SET released_at = now()
    WHERE q.lane = $1 AND q.site = $2 AND q.released_at IS NULL AND starts_with(q.error, $3 || ':')
        AND EXISTS (SELECT 1 FROM lane_entry AS e WHERE e.site = q.site AND e.lane = q.lane AND e.journal = q.journal AND e.seq = q.seq)
    RETURNING q.site, q.lane, q.journal, q.seq
)
UPDATE lane_entry AS e SET interpreted_at = NULL FROM chosen AS c
WHERE e.site = c.site AND e.lane = c.lane AND e.journal = c.journal AND e.seq = c.seq

-- name: lane_let_go
-- What was set aside with exactly these words is a person's no more, and stays interpreted.
UPDATE quarantine AS q SET released_at = now()
WHERE q.lane = $1 AND q.site = $2 AND q.released_at IS NULL AND q.error = ANY($3::text[])
