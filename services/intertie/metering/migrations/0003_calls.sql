-- Calls of offerings: the site's sealed word and the gateway's own word on each, and what follows from both.
CREATE TABLE call (
    site            text NOT NULL,
    call            text NOT NULL,
    offering        text NOT NULL,
    tenant          text NOT NULL,
    -- by the gateway's clock: when it was made, and the day of the settlement time zone
    at              timestamptz NOT NULL,
    day             text NOT NULL,
    -- the site's word, exactly as it sealed it; null until it comes
    payload         text,
    signer          text,
    signature       text,
    received_at     timestamptz,
    proven          boolean NOT NULL DEFAULT false,
    -- the gateway's word
    seen            text,
    seen_at         timestamptz,
    state           text NOT NULL CHECK (state IN ('settled', 'waiting', 'suspense')),
    reason          text NOT NULL DEFAULT '',
    outcome         text NOT NULL,
    payer           text,
    amount          numeric CHECK (amount >= 0 AND amount <> 'NaN'::numeric AND amount < 'Infinity'::numeric),
    currency        text,
    priced_spec     text,
    priced_revision integer,
    input_tokens    bigint,
    output_tokens   bigint,
    response_us     bigint,
    first_byte_us   bigint,
    kept            boolean,
    book            text NOT NULL,
    changed_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (site, call),
    CONSTRAINT call_has_a_word CHECK (payload IS NOT NULL OR seen IS NOT NULL),
    CONSTRAINT call_says_why CHECK ((state = 'settled') = (reason = '')),
    CONSTRAINT call_settled_has_amount CHECK (state <> 'settled' OR (amount IS NOT NULL AND payer IS NOT NULL)),
    FOREIGN KEY (priced_spec, priced_revision) REFERENCES spec_revision (spec, revision)
);
CREATE INDEX call_of_tenant ON call (tenant, at);
CREATE INDEX call_of_offering ON call (site, offering, at);
CREATE INDEX call_open ON call (site, call) WHERE state <> 'settled';

-- Once said, a word stays as it was.
CREATE FUNCTION call_words_stay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.payload IS NOT NULL AND (NEW.payload, NEW.signer, NEW.signature) IS DISTINCT FROM (OLD.payload, OLD.signer, OLD.signature))
       OR (OLD.seen IS NOT NULL AND NEW.seen IS DISTINCT FROM OLD.seen) THEN
        RAISE EXCEPTION 'what was said of call % stays', OLD.call USING ERRCODE = 'restrict_violation', CONSTRAINT = 'call_words_stay';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER call_words_stay BEFORE UPDATE ON call FOR EACH ROW EXECUTE FUNCTION call_words_stay();
CREATE TRIGGER call_append_only BEFORE DELETE OR TRUNCATE ON call EXECUTE FUNCTION metering_append_only();

-- An entry is about one attempt or about one call.
ALTER TABLE entry ALTER COLUMN attempt DROP NOT NULL;
ALTER TABLE entry ADD COLUMN call_site text;
ALTER TABLE entry ADD COLUMN call text;
ALTER TABLE entry ADD CONSTRAINT entry_of_one CHECK ((attempt IS NULL) <> (call IS NULL) AND (call IS NULL) = (call_site IS NULL));
ALTER TABLE entry ADD FOREIGN KEY (call_site, call) REFERENCES call (site, call);
CREATE INDEX entry_of_call ON entry (call_site, call) WHERE call IS NOT NULL;
