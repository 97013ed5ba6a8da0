"""The simple commands of a script, as the shell would see them: a table, and a fuzz that finds no exception and no line outside the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.lint.words import LITERAL_DOLLAR, commands, read

Row = tuple[int, list[str]]

SCRIPTS: dict[str, tuple[str, list[Row]]] = {
    "words": ("a  b\tc\n", [(1, ["a", "b", "c"])]),
    "comment": ("# /data\na # /data\nb#c\n", [(2, ["a"]), (3, ["b#c"])]),
    "separators": ("a; b && c || d | e & f\n", [(1, [c]) for c in "abcdef"]),
    "continued": ("a \\\n  b\nc\n", [(1, ["a", "b"]), (3, ["c"])]),
    "quotes": ("a 'b c' \"d e\" f\\ g h'i'j\n", [(1, ["a", "b c", "d e", "f g", "hij"])]),
    "literal dollar": ("a '$x' \"$y\" \\$z\n", [(1, ["a", f"{LITERAL_DOLLAR}x", "$y", f"{LITERAL_DOLLAR}z"])]),
    "quoted newline": ("a 'b\nc' d\ne\n", [(1, ["a", "b\nc", "d"]), (3, ["e"])]),
    "ansi quote": ("a $'b\\'c' d\n", [(1, ["a", "b\\'c", "d"])]),
    "here-document": ("cat <<EOF\n/never $(x)\nEOF\na\n", [(1, ["cat"]), (4, ["a"])]),
    "quoted delimiter": ("cat <<'E F' b\nnever\nE F\na\n", [(1, ["cat", "b"]), (4, ["a"])]),
    "tabs of a here-document": ("cat <<-EOF\n\tnever\n\tEOF\na\n", [(1, ["cat"]), (4, ["a"])]),
    "two here-documents": ("a <<X <<Y\n1\nX\n2\nY\nb\n", [(1, ["a"]), (6, ["b"])]),
    "unfinished here-document": ("cat <<EOF\nnever\n", [(1, ["cat"])]),
    "here-string": ("a <<< word\nb\n", [(1, ["a"]), (2, ["b"])]),
    "substitution": ("x=$(a b) y=`c d` e\n", [(1, ["a", "b"]), (1, ["c", "d"]), (1, ["e"])]),
    "nested substitution": ('a "$(b "$(c)")"\n', [(1, ["c"]), (1, ["b", "$(…)"]), (1, ["a", "$(…)"])]),
    "process substitution": ("a <(b c) >(d)\n", [(1, ["b", "c"]), (1, ["d"]), (1, ["a", "<(…)", "<(…)"])]),
    "subshell": ("(a b; c) && d\n", [(1, ["a", "b"]), (1, ["c"]), (1, ["d"])]),
    "group": ("{ a; b; }\n", [(1, ["a"]), (1, ["b"])]),
    "if": ("if a; then b; elif c; then d; else e; fi\n", [(1, [c]) for c in "abcde"]),
    "loops": ("while a; do b; done\nuntil c; do d; done\n", [(1, ["a"]), (1, ["b"]), (2, ["c"]), (2, ["d"])]),
    "for": ("for i in 1 2; do a $i; done\n", [(1, ["1", "2"]), (1, ["a", "$i"])]),
    "case": ("case $1 in\n a|b) c ;;\n (d) e ;;\n *) f\nesac\ng\n", [(2, ["c"]), (3, ["e"]), (4, ["f"]), (6, ["g"])]),
    "case in a substitution": ("a $(case x in b) c;; esac) d\n", [(1, ["c"]), (1, ["a", "$(…)", "d"])]),
    "function": ("f() { a; }\nfunction g { b; }\n", [(1, ["a"]), (2, ["b"])]),
    "tests": ("if [[ -f /data/x && $y < z ]]; then a; fi\n[ -f b ] && c\n", [(1, ["a"]), (2, ["[", "-f", "b", "]"]), (2, ["c"])]),
    "arithmetic": ("((i = i + 1))\na $((1 + (2))) b\n", [(2, ["a", "$((…))", "b"])]),
    "array": ("x=(a 'b c' # no\n d)\ne ${x[@]}\n", [(3, ["e", "${x[@]}"])]),
    "braced": ("a ${b:-/c d} e\n", [(1, ["a", "${b:-/c d}", "e"])]),
    "redirections": ("a > b 2>&1 <c &>d\n>e\n", [(1, ["a"])]),
    "negation": ("! a | time b\n", [(1, ["a"]), (1, ["b"])]),
    "line ends of another system": ("a b\r\nc\r\n", [(1, ["a", "b"]), (2, ["c"])]),
    "unfinished quote": ("a 'b\nc", [(1, ["a", "b\nc"])]),
    "unfinished substitution": ("a $(b", [(1, ["b"]), (1, ["a", "$(…)"])]),
    "nothing": ("", []),
}


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_is_read_as_the_shell_reads_it(name: str) -> None:
    script, expected = SCRIPTS[name]
    assert [(c.line, [w.text for w in c.words]) for c in commands(script) if c.words] == expected


def test_assignments_and_redirections_stand_apart_from_words() -> None:
    [command] = commands("A=/x B+='y z' run -o=1 > /out 2>> /err < in\n")
    assert [(name, word.text) for name, word in command.assigned] == [("A", "/x"), ("B", "y z")]
    assert [word.text for word in command.words] == ["run", "-o=1"]
    assert [(operator, word.text) for operator, word in command.redirects] == [(">", "/out"), (">>", "/err"), ("<", "in")]


def test_the_lines_of_here_documents_are_known() -> None:
    assert read("a <<E\nb\nc\nE\nd\n")[1] == {2, 3, 4}


PIECES = st.sampled_from(
    [
        *" \t\n;&|()<>'\"\\$`{}#=!~[]",
        "$(",
        "<<E\n",
        "E\n",
        "<<<",
        "((",
        "))",
        "case x in",
        "esac",
        ";;",
        "for",
        "if",
        "/a/b",
        "word",
        "${",
        "[[",
        "]]",
        "\r\n",
    ]
)


@given(st.lists(PIECES, max_size=60).map("".join))
def test_no_text_is_too_strange_to_be_read(script: str) -> None:
    lines = script.count("\n") + 1
    assert all(1 <= command.line <= lines for command in commands(script))


@given(st.text(max_size=200))
def test_no_bytes_are_too_strange_to_be_read(script: str) -> None:
    commands(script)


def test_deep_nesting_is_no_overflow() -> None:
    commands("a " + "$(" * 20_000)
    commands('"$(' * 20_000)
    commands("a=(" * 20_000)
    commands("<(" * 20_000)
    commands('$"' * 20_000)
