"""SQL by name. A package keeps its statements in `queries.sql`; each begins with `-- name: load_job`, and the comment lines below that
are its documentation. `check_queries` lets PostgreSQL itself parse every one against a migrated schema, and looks in the package's sources for
names that do not exist or are not used.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

_NAME = re.compile(r"--\s*name:\s*(?P<name>[a-z][a-z0-9_]*)\s*\Z")


class Query(str):
    """One statement: the SQL itself, with its name and documentation."""

    __slots__ = ("doc", "name", "sql")
    sql: str
    """The same text as a plain str: asyncpg takes no subclass."""
    name: str
    doc: str

    def __new__(cls, sql: str, name: str, doc: str) -> Query:
        query = super().__new__(cls, sql)
        query.sql = sql
        query.name = name
        query.doc = doc
        return query


class Queries:
    """The statements of one package, by attribute: `Q.load_job`. An unknown name is an AttributeError that says what is near."""

    def __init__(self, package: str, queries: Mapping[str, Query]) -> None:
        self._package = package
        self._queries = dict(queries)

    def __getattr__(self, name: str) -> Query:
        try:
            return self._queries[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._queries, n=3)
            hint = f"; near: {', '.join(near)}" if near else ""
            raise AttributeError(f"{self._package}/queries.sql has no query {name!r}{hint}") from None

    def __iter__(self) -> Iterator[Query]:
        return iter(self._queries.values())

    def __len__(self) -> int:
        return len(self._queries)

    def misnamed(self) -> list[str]:
        """What the package's sources say as `Q.name` and `queries.sql` does not hold, and what it holds and nobody says."""
        used: set[str] = set()
        for source in Path(str(resources.files(self._package))).rglob("*.py"):
            used.update(_said(ast.parse(source.read_text(encoding="utf-8"))))
        missing = [f"{self._package}: Q.{name} is not in queries.sql" for name in sorted(used - self._queries.keys())]
        idle = [f"{self._package}: {name} in queries.sql is used nowhere" for name in sorted(self._queries.keys() - used)]
        return missing + idle


def _said(tree: ast.Module) -> Iterator[str]:
    """Every `name` of a `Q.name` in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Q":
            yield node.attr


def plain(query: str) -> str:
    """A query as asyncpg takes it."""
    return query.sql if isinstance(query, Query) else query


def parse_queries(text: str, package: str) -> Queries:
    """The queries of a file's text; a statement without a name, a name without a statement and a name given twice are refused."""
    found: dict[str, Query] = {}
    name, lines = "", list[str]()

    def close() -> None:
        doc, sql = _split(lines)
        if not name:
            if sql:
                raise ValueError(f"{package}/queries.sql: a statement stands before the first '-- name:'")
            return
        if not sql:
            raise ValueError(f"{package}/queries.sql: {name} has no statement")
        if name in found:
            raise ValueError(f"{package}/queries.sql: {name} is there twice")
        found[name] = Query(sql, name, doc)

    for line in text.splitlines():
        if match := _NAME.match(line.strip()):
            close()
            name, lines = match["name"], []
        else:
            lines.append(line)
    close()
    return Queries(package, found)


def _split(lines: list[str]) -> tuple[str, str]:
    """Leading comment lines, and the statement without its closing semicolon."""
    body = "\n".join(lines).strip().splitlines()
    count = next((i for i, line in enumerate(body) if not line.lstrip().startswith("--")), len(body))
    doc = " ".join(line.lstrip().removeprefix("--").strip() for line in body[:count])
    return doc, "\n".join(body[count:]).strip().removesuffix(";").rstrip()


def load_queries(package: str) -> Queries:
    """Read `queries.sql` of an importable package (`intertie.scheduler`)."""
    return parse_queries(resources.files(package).joinpath("queries.sql").read_text(encoding="utf-8"), package)
