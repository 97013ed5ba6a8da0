-- Who acts, for whom, and which keys speak for which site. No secret is here: of tokens a digest, of keys the public half.

CREATE TABLE tenant (
    tenant  text PRIMARY KEY,
    record  jsonb NOT NULL,
    version bigint NOT NULL CHECK (version >= 1),
    CONSTRAINT tenant_name CHECK (record ->> 'tenant' = tenant)
);

CREATE TABLE token (
    id     text PRIMARY KEY,
    record jsonb NOT NULL,
    digest text NOT NULL UNIQUE CHECK (digest ~ '^[0-9a-f]{64}$'),
    tenant text GENERATED ALWAYS AS (record ->> 'tenant') STORED REFERENCES tenant,
    CONSTRAINT token_id CHECK (record ->> 'id' = id)
);

CREATE TABLE invitation (
    id     text PRIMARY KEY,
    digest text NOT NULL UNIQUE CHECK (digest ~ '^[0-9a-f]{64}$'),
    record jsonb NOT NULL,
    site   text NOT NULL GENERATED ALWAYS AS (record ->> 'site') STORED,
    -- used with keys or not used at all: there is no half
    CONSTRAINT invitation_used_with_keys
        CHECK ((record ->> 'used_at' IS NULL) = (record ->> 'site_key' = '') AND (record ->> 'site_key' = '') = (record ->> 'signing_key' = ''))
);
-- one invitation of a site can be used at any time
CREATE UNIQUE INDEX one_open_invitation_per_site ON invitation (site) WHERE record ->> 'used_at' IS NULL AND record ->> 'withdrawn_at' IS NULL;

CREATE TABLE site_account (
    site        text PRIMARY KEY,
    record      jsonb NOT NULL,
    account     text NOT NULL UNIQUE GENERATED ALWAYS AS (record ->> 'account') STORED,
    -- a key speaks for one site
    site_key    text NOT NULL UNIQUE GENERATED ALWAYS AS (record ->> 'site_key') STORED,
    signing_key text NOT NULL UNIQUE GENERATED ALWAYS AS (record ->> 'signing_key') STORED,
    CONSTRAINT site_account_name CHECK (record ->> 'site' = site),
    CONSTRAINT site_account_signed CHECK (record ->> 'jwt' <> '')
);

CREATE TABLE mapping (
    site    text NOT NULL REFERENCES site_account,
    tenant  text NOT NULL REFERENCES tenant,
    account text NOT NULL CHECK (account <> 'root'),
    PRIMARY KEY (site, tenant)
);
CREATE TABLE mapping_version (
    site    text PRIMARY KEY REFERENCES site_account,
    version bigint NOT NULL CHECK (version >= 1)
);
