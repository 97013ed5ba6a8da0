"""The simple commands of a shell script, each with its line: assignments, words, redirections. What is quoted, a comment or a here-document is
taken as the shell takes it. `rules` judges them.

Own, and small, on purpose: bashlex (GPL) raises on `case` and takes no large script; the tree-sitter grammar is a compiled part that every
client would carry, and it turns a whole file into one error node over constructs that bash takes. A lint needs no tree, only words and lines, and it must
never raise: what is unfinished ends at the end of the text. Grammar: POSIX.1-2017 XCU 2, and of bash(1) arrays, `[[`, `((`, `<<<`, `<( )`, `$' '`.
Not looked into: the bodies of here-documents, what stands between `[[` and `]]`, and text that is put together and then run (`eval "$x"`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LITERAL_DOLLAR = "\0"
"""Stands in `Word.text` for a `$` or a `~` that the shell does not expand."""
_BLANK = " \t"
_META = " \t\n;&|()<>"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^]]*\])?\+?=")
_REDIRECT = re.compile(r"\d*(?:&>>|&>|<<<|<<-|<<|<>|<&|>>|>&|>\||<|>)")
_EMPTY = re.compile(r"[ \t]*\)")
_RESERVED = frozenset("if then else elif fi while until do done for select in case esac { } ! function time [[ ]] coproc".split())
# Substitutions inside each other; beyond it they are text. People write three.
_DEEPEST = 24
# A word follows that is no command: `for NAME`, `function NAME`, `case WORD`.
_NAMING = frozenset({"for", "select", "function"})


@dataclass(frozen=True, slots=True)
class Word:
    """`text` without its quotes, expansions as written (`$HOME/x`); `shown` as it stands in the script; `line` counts from 1."""

    line: int
    text: str
    shown: str


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command. `assigned`: (name, value); `redirects`: (operator, target)."""

    line: int
    words: tuple[Word, ...] = ()
    assigned: tuple[tuple[str, Word], ...] = ()
    redirects: tuple[tuple[str, Word], ...] = ()

    @property
    def name(self) -> str:
        return self.words[0].text if self.words else ""


def commands(script: str, first_line: int = 1) -> list[Command]:
    """All of them, in order of their ends; those of substitutions and of functions too. Never raises."""
    return read(script, first_line)[0]


def read(script: str, first_line: int = 1) -> tuple[list[Command], frozenset[int]]:
    """The commands, and the lines that are bodies of here-documents."""
    reader = _Reader(script.replace("\r\n", "\n"), first_line)
    reader.read("")
    return reader.found, frozenset(reader.documents)


@dataclass(slots=True)
class _Draft:
    line: int = 0
    words: list[Word] = field(default_factory=list)
    assigned: list[tuple[str, Word]] = field(default_factory=list)
    redirects: list[tuple[str, Word]] = field(default_factory=list)
    naming: bool = False
    """The next word is a name, not a command."""


class _Reader:
    """One pass; substitutions are read by the same reader, further in."""

    def __init__(self, text: str, line: int) -> None:
        self.text, self.at, self.line = text, 0, line
        self.found: list[Command] = []
        self.documents: set[int] = set()
        self._bodies: list[tuple[str, bool]] = []
        self._draft = _Draft()
        # One `case` inside another, innermost last: True while a pattern is expected.
        self._cases: list[bool] = []
        self._deep = 0

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def read(self, stop: str) -> None:
        """Until `stop` at this level, which is passed, or the end."""
        self._deep += 1
        if self._deep <= _DEEPEST:
            self._read_on(stop)
        self._deep -= 1

    def _read_on(self, stop: str) -> None:
        outer, self._draft = self._draft, _Draft()
        cases, self._cases = self._cases, []
        depth = 0
        while self.at < len(self.text):
            char = self.peek()
            if char == stop and depth == 0 and not (self._cases and self._cases[-1]):
                self.at += 1
                break
            if char in "()":
                depth += self._bracket(char)
            else:
                self._step(char)
        self._end()
        self._draft, self._cases = outer, cases

    def _step(self, char: str) -> None:
        if char == "\n":
            self._end()
            self._newline()
        elif char in _BLANK:
            self.at += 1
        elif self.peek(2) == "\\\n":
            self.at, self.line = self.at + 2, self.line + 1
        elif char == "#":
            self.at = self._find("\n")
        elif (match := _REDIRECT.match(self.text, self.at)) and not self._substitution_at(match.end()):
            self._redirect(match[0])
        elif char in ";&|":
            self._separator()
        else:
            self._word()

    def _substitution_at(self, end: int) -> bool:
        """`<(` and `>(` are words."""
        return self.text[end - 1] in "<>" and self.text[end : end + 1] == "(" and self.text[end - 2 : end] not in ("<<", ">>")

    def _find(self, what: str) -> int:
        found = self.text.find(what, self.at)
        return len(self.text) if found < 0 else found

    def _newline(self) -> None:
        self.at, self.line = self.at + 1, self.line + 1
        for delimiter, tabs in self._bodies:
            while self.at < len(self.text):
                end = self._find("\n")
                body = self.text[self.at : end]
                self.documents.add(self.line)
                self.at, self.line = min(end + 1, len(self.text)), self.line + 1
                if (body.lstrip("\t") if tabs else body) == delimiter:
                    break
        self._bodies = []

    def _separator(self) -> None:
        two = self.peek(2)
        if self._cases and self._cases[-1]:
            self._draft = _Draft()
        self._end()
        if two == ";;" and self._cases:
            self._cases[-1] = True
        self.at += 2 if two in (";;", "&&", "||", "|&", ";&") else 1

    def _bracket(self, char: str) -> int:
        """What it does to the depth of brackets."""
        if char == "(" and self.peek(2) == "((" and not self._draft.words:
            self._skip_arithmetic()
            return 0
        self.at += 1
        if self._cases and self._cases[-1]:
            self._draft = _Draft()
            self._cases[-1] = char == "("
            return 0
        if char == "(" and len(self._draft.words) == 1 and _EMPTY.match(self.text, self.at):
            self.at = self._find(")") + 1
            self._draft = _Draft()
            return 0
        self._end()
        return 1 if char == "(" else -1

    def _skip_arithmetic(self) -> None:
        """Past the brackets that open here, whatever stands between them."""
        depth = 0
        while self.at < len(self.text):
            char = self.peek()
            self.at += 1
            depth += {"(": 1, ")": -1}.get(char, 0)
            self.line += char == "\n"
            if depth == 0:
                return

    def _redirect(self, operator: str) -> None:
        line = self.line
        self.at += len(operator)
        while self.peek() and self.peek() in _BLANK:
            self.at += 1
        target = self._take_word()
        kind = operator.lstrip("0123456789")
        self._begin(line)
        if kind in ("<<", "<<-"):
            self._bodies.append((target.text.replace(LITERAL_DOLLAR, "$"), kind == "<<-"))
        else:
            self._draft.redirects.append((kind, target))

    def _begin(self, line: int) -> None:
        self._draft.line = self._draft.line or line

    def _word(self) -> None:
        line, start = self.line, self.at
        word = self._take_word()
        if self.at == start:  # nothing was taken: never stand still
            self.at += 1
            return
        draft = self._draft
        if draft.naming:
            draft.naming = False
            return
        if not draft.words and word.shown in _RESERVED and not (self._cases and self._cases[-1] and word.shown != "esac"):
            self._reserved(word.shown)
            return
        self._begin(line)
        match = _ASSIGNMENT.match(word.text)
        if match and not draft.words:
            name = match[0].rstrip("+=").partition("[")[0]
            draft.assigned.append((name, Word(line, word.text[match.end() :], word.shown)))
        elif self._cases and self._cases[-1] and word.shown == "in" and len(draft.words) == 1:
            self._draft = _Draft()
        else:
            draft.words.append(word)

    def _reserved(self, word: str) -> None:
        if word == "case":
            self._case()
        elif word == "esac" and self._cases:
            self._cases.pop()
        elif word == "[[":
            match = re.compile(r".*?\s\]\](?=\s|[;&|)]|$)", re.DOTALL).match(self.text, self.at)
            self.at, self.line = (match.end(), self.line + match[0].count("\n")) if match else (len(self.text), self.line)
        self._draft.naming = word in _NAMING

    def _case(self) -> None:
        """`case WORD in`: the first pattern follows."""
        for _ in range(2):
            while self.peek() and (self.peek() in " \t\n"):
                self.line += self.peek() == "\n"
                self.at += 1
            self._take_word()
        self._cases.append(True)

    def _end(self) -> None:
        draft, self._draft = self._draft, _Draft()
        if draft.words or draft.assigned or draft.redirects:
            self.found.append(Command(draft.line, tuple(draft.words), tuple(draft.assigned), tuple(draft.redirects)))

    # words

    def _take_word(self) -> Word:
        line, start = self.line, self.at
        text = "".join(self._pieces())
        shown = self.text[start : self.at].strip()
        return Word(line, text, shown.partition("\n")[0])

    def _pieces(self) -> Iterator[str]:
        start = self.at
        while self.at < len(self.text):
            char = self.peek()
            if char in "<>" and self.peek(2)[1:] == "(" and self.at == start:
                self.at += 2
                self.read(")")
                yield "<(…)"
            elif char == "(" and self.text[self.at - 1 : self.at] == "=" and self.at > start and self._deep <= _DEEPEST:
                self.at += 1
                yield " ".join(self._array())
            elif char in _META:
                return
            elif char == "'":
                yield self._quoted(self.at + 1)
            elif char == '"':
                self.at += 1
                yield from self._double()
            elif char == "\\":
                yield self._escaped()
            elif char in "$`":
                yield self._dollar()
            else:
                self.at += 1
                yield char

    def _array(self) -> Iterator[str]:
        self._deep += 1
        while self.at < len(self.text) and self.peek() != ")":
            if self.peek() in " \t\n":
                self.line += self.peek() == "\n"
                self.at += 1
            elif self.peek() == "#":
                self.at = self._find("\n")
            else:
                before = self.at
                yield self._take_word().text
                self.at += self.at == before
        self.at += 1
        self._deep -= 1

    def _quoted(self, start: int, escapes: bool = False) -> str:
        """Up to the closing single quote; `$' '` knows escapes."""
        match = re.compile(r"(?:\\.|[^'\\])*" if escapes else r"[^']*", re.DOTALL).match(self.text, start)
        body = match[0] if match else ""
        self.at = start + len(body) + 1
        self.line += body.count("\n")
        return body.replace("$", LITERAL_DOLLAR).replace("~", LITERAL_DOLLAR)

    def _double(self) -> Iterator[str]:
        while self.at < len(self.text) and self.peek() != '"':
            char = self.peek()
            if char == "\\":
                yield self._escaped()
            elif char in "$`":
                yield self._dollar(quoted=True)
            else:
                self.at += 1
                self.line += char == "\n"
                yield LITERAL_DOLLAR if char == "~" else char
        self.at += 1

    def _escaped(self) -> str:
        char = self.peek(2)[1:]
        self.at += 2
        self.line += char == "\n"
        return {"\n": "", "$": LITERAL_DOLLAR, "~": LITERAL_DOLLAR}.get(char, char)

    def _dollar(self, quoted: bool = False) -> str:
        """`quoted`: inside double quotes, where a quote after the dollar is the closing one."""
        if self.peek() == "`":
            return self._backquoted()
        if self.peek(3) == "$((":
            self.at += 1
            self._skip_arithmetic()
            return "$((…))"
        if self.peek(2) == "$(":
            self.at += 2
            self.read(")")
            return "$(…)"
        if self.peek(2) == "${":
            return self._braced()
        if self.peek(2) == "$'" and not quoted:
            return self._quoted(self.at + 2, escapes=True)
        if self.peek(2) == '$"' and not quoted:
            self.at += 2
            return "".join(self._double())
        match = re.compile(r"\$(?:\w+|[@*#?$!-])?").match(self.text, self.at)
        self.at += len(match[0]) if match else 1
        return match[0] if match else "$"

    def _braced(self) -> str:
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self.peek()
            depth += {"{": 1, "}": -1}.get(char, 0)
            self.at += 2 if char == "\\" else 1
            self.line += char == "\n"
            if depth == 0 and char == "}":
                break
        return self.text[start : self.at]

    def _backquoted(self) -> str:
        match = re.compile(r"(?:\\.|[^`\\])*", re.DOTALL).match(self.text, self.at + 1)
        body = match[0] if match else ""
        self.found += commands(re.sub(r"\\([`$\\])", r"\1", body), self.line)
        self.line += body.count("\n")
        self.at += len(body) + 2
        return "$(…)"
