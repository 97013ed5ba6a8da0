"""The registry's rules. Pure: records and `now` in, records and refusals out."""
