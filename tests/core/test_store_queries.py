"""Statements by name: what a file of them may look like."""

from __future__ import annotations

import pytest

from intertie.store.queries import Query, load_queries, parse_queries, plain

FILE = """
-- A file may begin with words.

-- name: load_job
-- One job,
-- or none.
SELECT * FROM job   -- not a name: here
WHERE job = $1;

-- name: count_jobs
SELECT count(*) FROM job
"""


def test_a_query_is_its_sql_with_a_name_and_its_words() -> None:
    queries = parse_queries(FILE, "p")
    assert queries.load_job == "SELECT * FROM job   -- not a name: here\nWHERE job = $1"
    assert (queries.load_job.name, queries.load_job.doc) == ("load_job", "One job, or none.")
    assert [query.name for query in queries] == ["load_job", "count_jobs"]


def test_an_unknown_name_says_what_is_near() -> None:
    with pytest.raises(AttributeError, match="no query 'load_jobs'; near: load_job"):
        _ = parse_queries(FILE, "p").load_jobs


def test_asyncpg_is_given_a_plain_str() -> None:
    assert type(plain(Query("SELECT 1", "one", ""))) is str
    assert plain("SELECT 2") == "SELECT 2"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("SELECT 1\n-- name: a\nSELECT 2", "before the first"),
        ("-- name: a\n-- only words\n-- name: b\nSELECT 1", "a has no statement"),
        ("-- name: a\nSELECT 1\n-- name: a\nSELECT 2", "a is there twice"),
    ],
)
def test_a_file_that_would_mislead_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_queries(text, "p")


def test_names_in_the_sources_and_in_the_file_are_compared() -> None:
    assert load_queries("intertie.store").misnamed() == []
    queries = parse_queries("-- name: idle\nSELECT 1", "intertie.store")
    assert "intertie.store: idle in queries.sql is used nowhere" in queries.misnamed()
    assert "intertie.store: Q.outbox_insert is not in queries.sql" in queries.misnamed()
