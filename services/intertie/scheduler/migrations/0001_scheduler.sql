-- Jobs, attempts and why they are where they are. What must hold whatever the code thinks is held here.

CREATE TABLE job (
    job           text PRIMARY KEY,
    tenant        text NOT NULL,
    submitted_by  text NOT NULL,
    spec          jsonb NOT NULL,
    client_key    text NOT NULL,
    content       text NOT NULL,
    -- the words of contracts.job.JobState; a test compares
    state         text NOT NULL CHECK (state IN ('pending', 'queued', 'placed', 'site_queued', 'staging', 'running', 'suspended', 'finishing',
                                                 'succeeded', 'failed', 'cancelled', 'expired', 'lost')),
    submitted_at  timestamptz NOT NULL,
    queued_at     timestamptz NOT NULL,
    ended_at      timestamptz,
    cancel_at     timestamptz,
    cancel_by     text NOT NULL DEFAULT '',
    cancel_reason text NOT NULL DEFAULT '',
    ending        text,
    failures      integer NOT NULL DEFAULT 0,
    attempts      integer NOT NULL DEFAULT 0,
    generation    bigint NOT NULL DEFAULT 0,
    site          text,
    traceparent   text NOT NULL DEFAULT '',
    version       bigint NOT NULL CHECK (version >= 1),
    -- what it was last told, so that the same is not written each second
    wait_digest   text,
    wait_reason   text,
    wait_since    timestamptz,
    CONSTRAINT job_ended_when_terminal CHECK ((ended_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled', 'expired', 'lost'))),
    CONSTRAINT job_finishing_knows_its_end CHECK ((ending IS NOT NULL) = (state = 'finishing')),
    -- one job per client key: the same request again finds it, also years later
    CONSTRAINT job_client_key UNIQUE (tenant, client_key)
);
CREATE INDEX job_queue ON job (queued_at, job) WHERE state = 'queued';
CREATE INDEX job_by_tenant ON job (tenant, job DESC);
CREATE INDEX job_by_site ON job (site, job DESC) WHERE site IS NOT NULL;

-- Environment values: nowhere else at the hub, in no event and no query, and gone once the process has them or never will.
CREATE TABLE job_env (
    job text PRIMARY KEY REFERENCES job,
    env jsonb NOT NULL
);

CREATE TABLE attempt (
    attempt         text PRIMARY KEY,
    job             text NOT NULL REFERENCES job,
    tenant          text NOT NULL,
    site            text NOT NULL,
    pool            text NOT NULL,
    kind            text NOT NULL,
    state           text NOT NULL CHECK (state IN ('offered', 'claimed', 'staging', 'running', 'ended', 'withdrawn', 'refused', 'not_started')),
    generation      bigint NOT NULL CHECK (generation >= 1),
    epoch           bigint NOT NULL,
    wall_s          bigint NOT NULL,
    -- the job's one holder; a run that the hub did not count on (stray) is recorded, and is not live
    live            boolean NOT NULL,
    result_pending  boolean NOT NULL DEFAULT false,
    stop_answer     text NOT NULL DEFAULT '',
    withdrawal_seen boolean NOT NULL DEFAULT false,
    -- an instruction is due, or its settling has not been seen at the site
    owed            boolean NOT NULL,
    -- who pays it, as far as the allowance counts
    counted         boolean NOT NULL DEFAULT false,
    quantity        bigint NOT NULL DEFAULT 0,
    offered_at      timestamptz NOT NULL,
    record          jsonb NOT NULL,
    version         bigint NOT NULL CHECK (version >= 1),
    -- no (epoch, generation) of a job is ever used for two attempts
    CONSTRAINT attempt_generation UNIQUE (job, epoch, generation)
);
-- one live attempt per job: the database refuses a second, whatever the code thinks
CREATE UNIQUE INDEX one_live_attempt ON attempt (job) WHERE live;
CREATE INDEX attempt_owed ON attempt (site) WHERE owed;
CREATE INDEX attempt_live ON attempt (site) WHERE live;
CREATE INDEX attempt_counted ON attempt (tenant, offered_at) WHERE counted;

CREATE TABLE attempt_device (
    attempt text NOT NULL REFERENCES attempt,
    site    text NOT NULL,
    pool    text NOT NULL,
    device  text NOT NULL,
    live    boolean NOT NULL,
    PRIMARY KEY (attempt, device)
);
-- one holder per device: also of two plans made at once
CREATE UNIQUE INDEX one_holder ON attempt_device (site, pool, device) WHERE live;

-- Numbers of instructions, per site; what an instruction says is derived from its attempt each time it is sent.
CREATE TABLE instruction (
    attempt text NOT NULL REFERENCES attempt,
    kind    text NOT NULL CHECK (kind IN ('offer', 'go', 'withdraw', 'stop', 'settle')),
    site    text NOT NULL,
    epoch   bigint NOT NULL,
    number  bigint NOT NULL,
    PRIMARY KEY (attempt, kind),
    CONSTRAINT instruction_number UNIQUE (site, epoch, number)
);
CREATE TABLE instruction_head (
    site   text NOT NULL,
    epoch  bigint NOT NULL,
    number bigint NOT NULL,
    PRIMARY KEY (site, epoch)
);

-- What happened, in the order in which it was recorded; never changed.
CREATE TABLE story (
    id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job  text NOT NULL REFERENCES job,
    line jsonb NOT NULL
);
CREATE INDEX story_of_job ON story (job, id);

-- Rounds that decided or told something, by the digest of everything they knew.
CREATE TABLE round (
    round         text PRIMARY KEY,
    at            timestamptz NOT NULL,
    input         text NOT NULL,
    leader_epoch  bigint NOT NULL,
    leader_number bigint NOT NULL,
    queued        integer NOT NULL,
    placed        integer NOT NULL,
    not_examined  integer NOT NULL
);
CREATE INDEX round_by_age ON round (at);

CREATE TABLE verdict (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job        text NOT NULL REFERENCES job,
    round      text NOT NULL,
    reason     text NOT NULL,
    text       text NOT NULL,
    since      timestamptz NOT NULL,
    rejections jsonb NOT NULL
);
CREATE INDEX verdict_of_job ON verdict (job, id DESC);

CREATE TABLE back_off (
    site     text PRIMARY KEY,
    faults   integer NOT NULL,
    until_at timestamptz NOT NULL,
    why      text NOT NULL
);

-- site '' = all sites together
CREATE TABLE quota (
    tenant  text NOT NULL,
    site    text NOT NULL DEFAULT '',
    kind    text NOT NULL,
    maximum bigint NOT NULL CHECK (maximum >= 0),
    PRIMARY KEY (tenant, site, kind)
);

-- Read model: what other keepers told, the newest version of each entity.
CREATE TABLE known (
    noun    text NOT NULL,
    entity  text NOT NULL,
    version bigint NOT NULL,
    body    bytea NOT NULL,
    at      timestamptz NOT NULL,
    PRIMARY KEY (noun, entity)
);

CREATE TABLE site_settings (
    site     text PRIMARY KEY,
    revision bigint NOT NULL CHECK (revision >= 1),
    content  text NOT NULL
);
