"""The lint of scripts at the command line: what sites told is fetched, what will not travel is said by line and site, before anything is sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from intertie.cli.client import Client
from intertie.cli.lint_texts import say_lint
from intertie.cli.out import line, note
from intertie.contracts.base import Contract
from intertie.contracts.facts import SiteFacts
from intertie.contracts.image import PoolImages
from intertie.contracts.job import JobRecord, Rejection
from intertie.contracts.site import SitesReply
from intertie.errors import IntertieError
from intertie.lint import Finding, Kind, Severity, Verdict, lint

# A submit that works says little; the dry run says all.
SHOWN_AT_SUBMIT = 8
# More sites than a line has room for are named by their verdict.
SITES_ONE_BY_ONE = 3
# What reading the directives says as well.
OF_DIRECTIVES = frozenset({Kind.PARTITION, Kind.ACCOUNT, Kind.NODES, Kind.OUTPUT})


class LintLine(Contract, frozen=True, kw_only=True):
    """One finding for programs. `verdicts`: `exists`, `absent` or `unknown` by site; empty where it is the same at every site."""

    line: int
    kind: str
    severity: str
    words: str
    what: str
    verdicts: dict[str, str] = {}
    text: str
    instead: str


class DryRun(Contract, frozen=True, kw_only=True):
    """`submit --dry-run --json`: the hub's answer, and the lint of the script for the sites that could take it."""

    job: JobRecord | None = None
    repeated: bool = False
    fits: list[str] = []
    rejections: list[Rejection] = []
    lint: list[LintLine] = []


@dataclass(frozen=True, slots=True)
class Told:
    """What each site told, of all its pools; None where nothing is told, or where the hub cannot be asked."""

    facts: Mapping[str, SiteFacts | None]
    images: Mapping[str, PoolImages | None]


def told_by(client: Client, sites: Collection[str]) -> Told:
    found: dict[str, SiteFacts | None] = dict.fromkeys(sites)
    images: dict[str, PoolImages | None] = {}
    with suppress(IntertieError):
        query: dict[str, object] = {}
        while True:
            page = client.get("/v1/sites", SitesReply, query)
            for pool in page.pools:
                told = pool.inventory.facts if pool.inventory is not None else None
                if told is not None and (not sites or pool.site in sites):
                    found[pool.site] = told
                elif not sites:
                    found.setdefault(pool.site, None)
                if pool.inventory is not None:
                    images[pool.site] = pool.inventory.images
            if not page.next:
                break
            query = {"after": page.next}
    return Told(found, images)


def check(client: Client, script: str, sites: Collection[str] = ()) -> tuple[Finding, ...]:
    """Findings for these sites (none named: all that are known). The hub is asked only if there is something to ask."""
    first = lint(script, {})
    if not first:
        return ()
    told = told_by(client, sites)
    return lint(script, told.facts, told.images)


def told(finding: Finding) -> LintLine:
    return LintLine(
        line=finding.line,
        kind=finding.kind.value,
        severity=finding.severity.value,
        words=finding.words,
        what=finding.what,
        verdicts={site: verdict.value for site, verdict in finding.verdicts.items()},
        text=say_lint(f"what.{finding.kind}", what=finding.what),
        instead=say_lint(f"instead.{finding.kind}", what=finding.what),
    )


def sentence(script: str, finding: Finding) -> str:
    """`train.sh:12: module cuda/12.4 (site-a: is there · site-b: absent)  → …`."""
    one = told(finding)
    sites = judged(one.verdicts)
    return say_lint("line", script=script, line=one.line, text=one.text, sites=f" ({sites})" if sites else "", instead=one.instead)


def judged(verdicts: Mapping[str, str]) -> str:
    """`site-a: is there · site-b: absent`; of many sites those of one verdict together, and one verdict of all of them once."""
    if len(set(verdicts.values())) == 1 and len(verdicts) > 1:
        return say_lint("every_site", verdict=say_lint(next(iter(verdicts.values()))))
    if len(verdicts) <= SITES_ONE_BY_ONE:
        return " · ".join(f"{site}: {say_lint(verdict)}" for site, verdict in sorted(verdicts.items()))
    groups = []
    for verdict in ("absent", "exists", "unknown"):
        if sites := sorted(site for site, said in verdicts.items() if said == verdict):
            more = f" +{len(sites) - SITES_ONE_BY_ONE}" if len(sites) > SITES_ONE_BY_ONE else ""
            groups.append(f"{', '.join(sites[:SITES_ONE_BY_ONE])}{more}: {say_lint(verdict)}")
    return " · ".join(groups)


def tell(script: str, findings: Sequence[Finding], said: Collection[int] = ()) -> None:
    """All of them, as part of the answer; but of a directive whose line was told already (`said`) not again that it is not used."""
    shown = [finding for finding in findings if not (finding.kind in OF_DIRECTIVES and finding.line in said)]
    for finding in shown:
        line(sentence(script, finding))
    if any(verdict is Verdict.UNKNOWN for finding in shown for verdict in finding.verdicts.values()):
        line(say_lint("unknown_means"))
    if not findings:
        line(say_lint("clean"))


def warn(script: str, findings: Sequence[Finding]) -> None:
    """Beside a submit: what fails where it is absent, unless every site has it."""
    grave = [finding for finding in findings if finding.severity is Severity.FAILS and not finding.holds_everywhere]
    for finding in grave[:SHOWN_AT_SUBMIT]:
        note(sentence(script, finding))
    if len(grave) > SHOWN_AT_SUBMIT:
        note(say_lint("more", count=len(grave) - SHOWN_AT_SUBMIT, script=script))
