-- Metering's own tables: agreements, attempts as others tell them, segments as sites sealed them, and a ledger that only grows.

CREATE FUNCTION metering_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is only added to; a correction is a new row', TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation', CONSTRAINT = 'append_only';
END $$;

-- Revisions of agreements, each as it was agreed.
CREATE TABLE spec_revision (
    spec           text NOT NULL,
    revision       integer NOT NULL CHECK (revision >= 1),
    provider       text NOT NULL,
    consumer       text NOT NULL,
    currency       text NOT NULL CHECK (currency ~ '^[A-Z]{3}$'),
    effective_from timestamptz NOT NULL,
    record         jsonb NOT NULL,
    agreed_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (spec, revision),
    -- one agreement between the same two parties, and one next revision of it
    UNIQUE (provider, consumer, revision)
);
CREATE TRIGGER spec_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON spec_revision EXECUTE FUNCTION metering_append_only();

-- One row per attempt: the scheduler's newest word, and what follows from everything held. `revision` fences each decision.
CREATE TABLE attempt (
    attempt          text PRIMARY KEY,
    revision         bigint NOT NULL CHECK (revision >= 1),
    tenant           text,
    job              text,
    site             text,
    state            text NOT NULL DEFAULT '',
    version          bigint NOT NULL DEFAULT 0,
    -- JSON as text: what a job printed may hold \u0000, which jsonb refuses
    snapshot         text,
    since            timestamptz,
    -- null while more may come
    until            timestamptz,
    complete         boolean NOT NULL,
    priced_spec      text,
    priced_revision  integer,
    settled_version  bigint NOT NULL DEFAULT 0,
    settled_amount   numeric,
    settled_currency text,
    settled_payer    text,
    settled_segments integer,
    -- thousandths × microseconds of 100,000 devices in a year pass what a bigint holds
    settled_quantity numeric,
    changed_at       timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT attempt_priced_as_a_whole CHECK ((priced_spec IS NULL) = (priced_revision IS NULL)),
    FOREIGN KEY (priced_spec, priced_revision) REFERENCES spec_revision (spec, revision)
);
CREATE INDEX attempt_of_tenant ON attempt (tenant, attempt);

-- What a site measured, exactly as it sealed it. The columns beside the payload are for reading.
CREATE TABLE segment (
    number         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id             text NOT NULL,
    digest         text NOT NULL,
    site           text NOT NULL,
    attempt        text NOT NULL REFERENCES attempt (attempt),
    journal        text NOT NULL,
    seq            bigint NOT NULL CHECK (seq >= 1),
    phase          text NOT NULL,
    device_kind    text NOT NULL,
    model          text NOT NULL,
    quantity_milli bigint NOT NULL CHECK (quantity_milli >= 0),
    starts_at      timestamptz NOT NULL,
    ends_at        timestamptz NOT NULL,
    payload        text NOT NULL,
    signer         text NOT NULL,
    signature      text NOT NULL,
    received_at    timestamptz NOT NULL,
    proven         boolean NOT NULL,
    tenant         text,
    -- the same bytes from the same site are the same fact
    UNIQUE (id, digest, site)
);
CREATE INDEX segment_of_attempt ON segment (attempt, number);
CREATE TRIGGER segment_append_only
    BEFORE DELETE OR TRUNCATE OR UPDATE OF id, digest, site, attempt, journal, seq, phase, device_kind, model, quantity_milli, starts_at, ends_at,
        payload, signer, signature, received_at ON segment
    EXECUTE FUNCTION metering_append_only();

-- Why segments wait, or waited. A segment without an open row counts.
CREATE TABLE suspense (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    segment     bigint NOT NULL REFERENCES segment (number),
    attempt     text NOT NULL,
    reason      text NOT NULL CHECK (reason <> ''),
    since       timestamptz NOT NULL DEFAULT now(),
    released_at timestamptz
);
CREATE UNIQUE INDEX one_open_reason ON suspense (segment) WHERE released_at IS NULL;
CREATE INDEX suspense_open ON suspense (attempt, reason) WHERE released_at IS NULL;

-- The ledger: entries that sum to zero per currency, never changed. `charges` is what was rated when the entry was made: its explanation.
CREATE TABLE entry (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    attempt       text NOT NULL REFERENCES attempt (attempt),
    kind          text NOT NULL CHECK (kind IN ('hold', 'post', 'release')),
    reason        text NOT NULL,
    spec          text,
    spec_revision integer,
    charges       jsonb NOT NULL,
    at            timestamptz NOT NULL DEFAULT now(),
    FOREIGN KEY (spec, spec_revision) REFERENCES spec_revision (spec, revision)
);
CREATE INDEX entry_of_attempt ON entry (attempt);
CREATE TABLE posting (
    entry    bigint NOT NULL REFERENCES entry (id),
    account  text NOT NULL,
    currency text NOT NULL CHECK (currency ~ '^[A-Z]{3}$'),
    amount   numeric NOT NULL CHECK (amount <> 0 AND amount <> 'NaN'::numeric AND abs(amount) < 'Infinity'::numeric),
    PRIMARY KEY (entry, account, currency)
);
CREATE TRIGGER entry_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON entry EXECUTE FUNCTION metering_append_only();
CREATE TRIGGER posting_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON posting EXECUTE FUNCTION metering_append_only();

-- Whatever the code thinks: an entry that does not sum to zero in each currency does not commit.
CREATE FUNCTION entry_balances() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM posting WHERE entry = NEW.entry GROUP BY currency HAVING sum(amount) <> 0) THEN
        RAISE EXCEPTION 'entry % does not sum to zero', NEW.entry USING ERRCODE = 'check_violation', CONSTRAINT = 'entry_balances';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER entry_balances AFTER INSERT ON posting DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION entry_balances();

-- What the scheduler may spend for a tenant without asking. The audit keeps the former ones.
CREATE TABLE allowance (
    tenant  text PRIMARY KEY,
    version bigint NOT NULL CHECK (version >= 1),
    record  jsonb NOT NULL
);

-- Read models: whose key speaks for a site (former ones too: what they signed may still be on its way), and what jobs are called.
CREATE TABLE site_key (
    site    text NOT NULL,
    key     text NOT NULL,
    revoked boolean NOT NULL,
    version bigint NOT NULL CHECK (version >= 1),
    PRIMARY KEY (site, key)
);
CREATE TABLE job_name (
    job     text PRIMARY KEY,
    name    text NOT NULL,
    version bigint NOT NULL
);
