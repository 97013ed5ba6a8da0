"""Identity's rules. Pure: records and `now` in; records, reasons and refusals out. Signatures and hashes are made by `intertie.trust`."""
