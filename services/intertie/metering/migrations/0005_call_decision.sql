-- What a named person decided about a call whose tokens nobody counted: a fact of its own, beside the words, which stay as they are.
CREATE TABLE call_decision (
    site          text NOT NULL,
    call          text NOT NULL,
    input_tokens  bigint NOT NULL CHECK (input_tokens >= 0),
    output_tokens bigint NOT NULL CHECK (output_tokens >= 0),
    who           text NOT NULL,
    why           text NOT NULL CHECK (why <> ''),
    at            timestamptz NOT NULL,
    -- the first decision stands
    PRIMARY KEY (site, call),
    FOREIGN KEY (site, call) REFERENCES call (site, call)
);
CREATE TRIGGER call_decision_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON call_decision EXECUTE FUNCTION metering_append_only();
