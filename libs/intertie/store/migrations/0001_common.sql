-- The tables that every hub service has in its own schema, whatever nouns it keeps. Text ids, timestamptz throughout, bytea for what was signed.

-- The service's epoch: raised on restore and on any failover that may have lost a tail. Every number compares as (epoch, n).
CREATE TABLE service_epoch (
    only_row  boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    epoch     bigint NOT NULL CHECK (epoch >= 1),
    reason    text NOT NULL,
    raised_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO service_epoch (epoch, reason) VALUES (1, 'created');

-- Who leads a role. Taking office raises (epoch, number); a decision write reads its own row FOR SHARE, so that no write of a former leader
-- becomes visible after the first write of the next one.
CREATE TABLE leader (
    role     text PRIMARY KEY,
    epoch    bigint NOT NULL,
    number   bigint NOT NULL CHECK (number >= 1),
    holder   text NOT NULL,
    taken_at timestamptz NOT NULL DEFAULT now()
);

-- What this service tells others, written in the transaction of the change. Numbers are given by the relay to committed rows, never here:
-- a number given at insert would skip whoever commits late.
CREATE TABLE outbox (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id     text NOT NULL UNIQUE,
    type         text NOT NULL,
    noun         text NOT NULL,
    entity       text NOT NULL,
    version      bigint NOT NULL CHECK (version >= 1),
    subject      text NOT NULL,
    body         bytea NOT NULL,
    headers      jsonb NOT NULL,
    created_at   timestamptz NOT NULL,
    epoch        bigint,
    number       bigint,
    -- The generation of the stream that acknowledged it; 0 = none yet. Lower than stream_mark.generation = to be published (again).
    generation   bigint NOT NULL DEFAULT 0,
    published_at timestamptz,
    CONSTRAINT outbox_numbered_as_a_whole CHECK ((epoch IS NULL) = (number IS NULL)),
    CONSTRAINT outbox_published_has_a_number CHECK (generation = 0 OR number IS NOT NULL)
);
CREATE INDEX outbox_unnumbered ON outbox (id) WHERE number IS NULL;
CREATE INDEX outbox_by_generation ON outbox (generation, id);
CREATE INDEX outbox_by_age ON outbox (created_at);
-- no number is ever used for two events
CREATE UNIQUE INDEX outbox_number ON outbox (noun, epoch, number) WHERE number IS NOT NULL;

-- The last number given out per (epoch, noun); said each beat so that a consumer behind can see it.
CREATE TABLE outbox_head (
    noun   text NOT NULL,
    epoch  bigint NOT NULL,
    number bigint NOT NULL,
    PRIMARY KEY (noun, epoch)
);

-- The stream as the relay last saw it. Another creation time, or a lower head, means that it was lost: the generation is raised and the whole
-- retention published again, whatever was marked as published.
CREATE TABLE stream_mark (
    stream     text PRIMARY KEY,
    generation bigint NOT NULL CHECK (generation >= 1),
    created    timestamptz NOT NULL,
    head       bigint NOT NULL,
    seen_at    timestamptz NOT NULL DEFAULT now()
);

-- Events already applied, by id: a repeat changes nothing. Kept longer than any event can come back (see outbox.py).
CREATE TABLE inbox (
    event_id   text NOT NULL,
    consumer   text NOT NULL DEFAULT '',
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (event_id, consumer)
);
CREATE INDEX inbox_by_age ON inbox (applied_at);

-- Events given up after the last try: nothing vanishes without a word.
CREATE TABLE dead_letter (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer    text NOT NULL,
    event_id    text NOT NULL,
    type        text NOT NULL,
    subject     text NOT NULL,
    headers     jsonb NOT NULL,
    body        bytea NOT NULL,
    error       text NOT NULL,
    tries       integer NOT NULL,
    at          timestamptz NOT NULL,
    replayed_at timestamptz
);
CREATE INDEX dead_letter_open ON dead_letter (id) WHERE replayed_at IS NULL;

-- Versions of the faults this service reports; a fault has no row of its own to carry one.
CREATE SEQUENCE fault_version;

-- Who did what, on what, why, with which result; written in the effect's transaction and never changed.
CREATE TABLE audit (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL,
    actor    text NOT NULL,
    action   text NOT NULL,
    target   text NOT NULL,
    reason   text NOT NULL,
    result   text NOT NULL,
    trace_id text NOT NULL
);
CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'audit rows are never changed' USING ERRCODE = 'restrict_violation', CONSTRAINT = 'audit_append_only';
END $$;
CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit EXECUTE FUNCTION audit_is_append_only();

-- One row per site and lane: what this keeper knows of that site's journal.
CREATE TABLE lane_site (
    site                text NOT NULL,
    lane                text NOT NULL,
    session             text NOT NULL,
    journal             text NOT NULL,
    -- last contiguous committed entry, and the chain's digest there
    ack_through         bigint NOT NULL DEFAULT 0,
    digest              text NOT NULL,
    safe_through        bigint NOT NULL DEFAULT 0,
    interpreted_through bigint NOT NULL DEFAULT 0,
    -- grows with every sync, committed before its answer: silence is judged by its growth, never by a stored time
    heard               bigint NOT NULL DEFAULT 0,
    last_heard          timestamptz NOT NULL,
    last_nonce          bigint NOT NULL DEFAULT 0,
    taken_nonce         bigint NOT NULL DEFAULT 0,
    at_head             boolean NOT NULL DEFAULT false,
    -- attempts that hold devices as of the last entry at head; null = not said
    running             text[],
    instruction_epoch   bigint NOT NULL DEFAULT 0,
    instruction_mark    bigint NOT NULL DEFAULT 0,
    settings_revision   bigint NOT NULL DEFAULT 0,
    clocks_utc          timestamptz,
    clocks_boot_s       double precision,
    clocks_kernel_boot  text NOT NULL DEFAULT '',
    clock_offset_s      double precision NOT NULL DEFAULT 0,
    clock_error_s       double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (site, lane),
    CONSTRAINT lane_site_marks CHECK (safe_through <= ack_through AND interpreted_through <= ack_through)
);

-- Raw entries, exactly as they were journalled. A journal that was made anew starts at 1 again, so its id is part of the key.
CREATE TABLE lane_entry (
    site           text NOT NULL,
    lane           text NOT NULL,
    journal        text NOT NULL,
    seq            bigint NOT NULL CHECK (seq >= 1),
    digest         text NOT NULL,
    raw            bytea NOT NULL,
    received_at    timestamptz NOT NULL,
    interpreted_at timestamptz,
    PRIMARY KEY (site, lane, journal, seq)
);
CREATE INDEX lane_entry_uninterpreted ON lane_entry (site, lane, journal, seq) WHERE interpreted_at IS NULL;

-- Entries that are on disk here and could not be interpreted; they stop nothing and are counted.
CREATE TABLE quarantine (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    site        text NOT NULL,
    lane        text NOT NULL,
    journal     text NOT NULL,
    seq         bigint NOT NULL,
    raw         bytea NOT NULL,
    error       text NOT NULL,
    at          timestamptz NOT NULL,
    released_at timestamptz,
    UNIQUE (site, lane, journal, seq)
);
