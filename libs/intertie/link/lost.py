"""Entries that exist nowhere any more, as a person is told of them: the same for every keeper."""

from __future__ import annotations

from intertie.contracts.incident import ReportIncident, Severity
from intertie.contracts.link import Lane, LostRange
from intertie.ids import SiteName

# Of a name that a site says: the longest that is one.
NAME_LENGTH = 128


def range_lost(site: SiteName, lane: Lane, said: LostRange, then: str) -> ReportIncident:
    """One incident for each site and lane, whatever number of ranges; `then`: what is done about it, in sentences."""
    return ReportIncident(
        key=f"lane.lost_range/{site}/{lane}",
        kind="lane.lost_range",
        severity=Severity.CRITICAL,
        title=f"Entries of site {site} on lane {lane} are lost",
        text=f"Entries {said.first} to {said.last} of journal {said.journal[:NAME_LENGTH]!r} on lane {lane} exist nowhere any more: lost here by a "
        f"restore, forgotten at the site because they were called safe. {then}",
        site=site,
    )
