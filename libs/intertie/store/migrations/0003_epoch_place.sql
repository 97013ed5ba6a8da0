-- Which PostgreSQL this epoch was begun on. Another system identifier, or another timeline, means that a tail of what was committed may be
-- gone (a restore, a standby promoted): the epoch is then raised before anything is numbered. Null: not looked at yet.
ALTER TABLE service_epoch ADD COLUMN system_identifier bigint;
ALTER TABLE service_epoch ADD COLUMN timeline bigint;
