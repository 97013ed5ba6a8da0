"""Metering's pure rules: from evidence (segments, the scheduler's record, agreements, the ledger so far) to what follows from it.

Nothing here knows a clock, a disk or a network. `reckon` is the one question; the other files are its parts.
"""
