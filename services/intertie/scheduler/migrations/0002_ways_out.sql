-- Silence, survivors, promises, and what this hub did not know (ADR 0006).

ALTER TABLE job
    ADD COLUMN survivor  text,
    ADD COLUMN delivered text,
    -- of this service when the job came in; before this migration there was one
    ADD COLUMN epoch     bigint NOT NULL DEFAULT 1;

ALTER TABLE attempt
    -- its devices are counted at its site, whether or not it is the job's holder
    ADD COLUMN holding    boolean NOT NULL DEFAULT false,
    ADD COLUMN stop_cause text,
    ADD COLUMN stop_why   text NOT NULL DEFAULT '',
    ADD COLUMN lease_s    bigint NOT NULL DEFAULT 0,
    ADD COLUMN journal    text;
UPDATE attempt SET holding = live;

ALTER TABLE attempt DROP CONSTRAINT attempt_state_check;
ALTER TABLE attempt ADD CONSTRAINT attempt_state_check
    CHECK (state IN ('offered', 'claimed', 'staging', 'running', 'ended', 'withdrawn', 'refused', 'not_started', 'lost'));

CREATE INDEX attempt_holding ON attempt (site) WHERE holding;
CREATE INDEX attempt_of_job ON attempt (job);

-- One job keeps away from one site for a while; forgotten when it starts or ends.
CREATE TABLE avoid (
    job      text NOT NULL REFERENCES job,
    site     text NOT NULL,
    faults   integer NOT NULL,
    until_at timestamptz NOT NULL,
    why      text NOT NULL,
    PRIMARY KEY (job, site)
);

-- What a tenant may use at a site that is alone. Rows with devices 0 keep the number only.
CREATE TABLE islanded_grant (
    site          text NOT NULL,
    tenant        text NOT NULL,
    kind          text NOT NULL,
    devices       bigint NOT NULL CHECK (devices >= 0),
    card_hours    bigint,
    valid_until   timestamptz NOT NULL,
    set_by        text NOT NULL,
    revision      bigint NOT NULL CHECK (revision >= 1),
    spec          text,
    spec_revision bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (site, tenant, kind)
);

ALTER TABLE site_settings
    -- how much the copy knew that made this revision
    ADD COLUMN known   bigint NOT NULL DEFAULT 0,
    ADD COLUMN made_at timestamptz NOT NULL DEFAULT now();
