"""The scheduler's rules, pure: what an entry, a cancel or a placement does to a job, and which instructions follow from that.

`rows` is the vocabulary; `submit`, `place`, `cancel` and `interpret` make a `Change` each; `orders` derives instructions from attempts;
`sight` turns read models and live telemetry into the planner's pools. State and `now` come in, changes and reasons go out.
"""
