-- Call offerings as their sites tell them. A record is the contract's own JSON; one that is offered no more stays, withdrawn.
CREATE TABLE call_offering (
    site    text NOT NULL REFERENCES site,
    name    text NOT NULL,
    record  jsonb NOT NULL,
    version bigint NOT NULL GENERATED ALWAYS AS ((record ->> 'version')::bigint) STORED,
    PRIMARY KEY (site, name),
    CONSTRAINT call_offering_name CHECK (record ->> 'site' = site AND record -> 'offering' ->> 'name' = name),
    CONSTRAINT call_offering_version CHECK (version >= 1)
);

-- Every revision of what was declared: what a call was promised and asked at its time.
CREATE TABLE call_offering_revision (
    site     text NOT NULL,
    name     text NOT NULL,
    revision bigint NOT NULL CHECK (revision >= 1),
    offering jsonb NOT NULL,
    told_at  timestamptz NOT NULL,
    PRIMARY KEY (site, name, revision),
    FOREIGN KEY (site, name) REFERENCES call_offering DEFERRABLE INITIALLY DEFERRED
);
