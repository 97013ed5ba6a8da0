-- Incidents, and what is known of sites and pools to judge a silence.

-- The record is the contract's own JSON; columns that the database judges or finds by are generated from it and cannot differ.
CREATE TABLE incident (
    incident text PRIMARY KEY,
    record   jsonb NOT NULL,
    key      text NOT NULL GENERATED ALWAYS AS (record ->> 'key') STORED,
    state    text NOT NULL GENERATED ALWAYS AS (record ->> 'state') STORED,
    site     text GENERATED ALWAYS AS (record ->> 'site') STORED,
    tenant   text GENERATED ALWAYS AS (record ->> 'tenant') STORED,
    version  bigint NOT NULL GENERATED ALWAYS AS ((record ->> 'version')::bigint) STORED,
    CONSTRAINT incident_id CHECK (record ->> 'incident' = incident),
    CONSTRAINT incident_state CHECK (state IN ('open', 'acknowledged', 'closed')),
    CONSTRAINT incident_closed_with_reason CHECK (state <> 'closed' OR length(trim(record ->> 'close_reason')) > 0),
    CONSTRAINT incident_version CHECK (version >= 1)
);
-- one open incident per key: the database refuses a second, whatever the code thinks
CREATE UNIQUE INDEX one_open_incident_per_key ON incident (key) WHERE state <> 'closed';
CREATE INDEX incident_by_site ON incident (site, incident);

-- The registry's sites and pools as last applied; only a higher version is taken.
CREATE TABLE site_view (
    site    text PRIMARY KEY,
    version bigint NOT NULL,
    record  jsonb NOT NULL
);
CREATE TABLE pool_view (
    site    text NOT NULL,
    pool    text NOT NULL,
    version bigint NOT NULL,
    phase   text NOT NULL,
    PRIMARY KEY (site, pool)
);
