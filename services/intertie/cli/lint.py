"""The lint of scripts at the command line: what sites told is fetched, what will not travel is said by line and site, before anything is sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from intertie.cli.client import Client
from intertie.cli.lint_texts import say_lint
from intertie.cli.out import line, note
from intertie.contracts.base import Contract
from intertie.contracts.facts import SiteFacts
from intertie.contracts.job import JobRecord, Rejection
from intertie.contracts.site import SitesReply
from intertie.errors import IntertieError
from intertie.lint import Finding, Severity, lint

# A submit that works says little; the dry run says all.
SHOWN_AT_SUBMIT = 8


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


def facts_of(client: Client, sites: Collection[str]) -> Mapping[str, SiteFacts | None]:
    """What each site told, of all its pools; None where nothing is told, or where the hub cannot be asked."""
    found: dict[str, SiteFacts | None] = dict.fromkeys(sites)
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
            if not page.next:
                break
            query = {"after": page.next}
    return found


def check(client: Client, script: str, sites: Collection[str] = ()) -> tuple[Finding, ...]:
    """Findings for these sites (none named: all that are known). The hub is asked only if there is something to ask."""
    first = lint(script, {})
    return lint(script, facts_of(client, sites)) if first else ()


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
    sites = " · ".join(f"{site}: {say_lint(verdict)}" for site, verdict in sorted(one.verdicts.items()))
    return say_lint("line", script=script, line=one.line, text=one.text, sites=f" ({sites})" if sites else "", instead=one.instead)


def tell(script: str, findings: Sequence[Finding]) -> None:
    """All of them, as part of the answer."""
    for finding in findings:
        line(sentence(script, finding))
    if not findings:
        line(say_lint("clean"))


def warn(script: str, findings: Sequence[Finding]) -> None:
    """Beside a submit: what fails where it is absent, unless every site has it."""
    grave = [finding for finding in findings if finding.severity is Severity.FAILS and not finding.holds_everywhere]
    for finding in grave[:SHOWN_AT_SUBMIT]:
        note(sentence(script, finding))
    if len(grave) > SHOWN_AT_SUBMIT:
        note(say_lint("more", count=len(grave) - SHOWN_AT_SUBMIT, script=script))
