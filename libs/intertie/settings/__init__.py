"""Settings from the environment, parsed once at the door into a typed Struct. All problems are told together, each with the variable, what
was wrong and what to do. Secrets never stand in a variable: a setting names a file, and `read_secret` opens it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from intertie.errors import Refused
from intertie.observe.redact import hide, secret_name

PREFIX = "INTERTIE_"

# Any secret of ours is a line; a file this large is another file.
_MOST_BYTES = 64 * 1024

T = TypeVar("T", bound=msgspec.Struct)


def load(kind: type[T], environ: Mapping[str, str], prefix: str = PREFIX) -> T:
    """Fields of `kind` from variables `<prefix><FIELD>`: str, int, float, bool, Path, lists by comma. `Refused('settings.invalid')`.

    A variable that is set but empty counts as not set. Variables of other programs with the same prefix are not looked at.
    """
    values: dict[str, object] = {}
    problems: list[str] = []
    for field in msgspec.structs.fields(kind):
        variable = f"{prefix}{field.name.upper()}"
        text = environ.get(variable, "").strip()
        if not text:
            if field.required:
                problems.append(f"{variable} is not set; {_wanted(field.type)} is needed")
            continue
        try:
            values[field.name] = _convert(text, field.type)
        except (msgspec.ValidationError, ValueError) as error:
            shown = "its value" if secret_name(field.name) else repr(text[:80])
            problems.append(f"{variable}: {shown} is not {_wanted(field.type)} ({_reason(error)})")
    if problems:
        raise Refused(
            "settings.invalid",
            "; ".join(problems),
            next_step="set these environment variables and start again",
            details={"problems": problems},
        )
    return kind(**values)


def _convert(text: str, kind: Any) -> object:
    if _is_list(kind):
        return msgspec.convert([part.strip() for part in text.split(",") if part.strip()], kind, strict=False, dec_hook=_hook)
    if kind is bool or bool in get_args(kind):
        low = text.lower()
        if low in ("1", "true", "yes", "on"):
            return True
        if low in ("0", "false", "no", "off"):
            return False
        raise ValueError("use true or false")
    if Path in (kind, *get_args(kind)):
        return Path(text).expanduser()
    return msgspec.convert(text, kind, strict=False, dec_hook=_hook)


def _hook(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value)).expanduser()
    raise NotImplementedError(kind)  # msgspec's word of a hook for a type that is not its own; msgspec refuses the value then.


def _is_list(kind: Any) -> bool:
    return any(get_origin(one) in (list, tuple) for one in (kind, *get_args(kind)))


def _wanted(kind: Any) -> str:
    if _is_list(kind):
        return "a list separated by commas"
    one = next((part for part in (kind, *get_args(kind)) if part in (bool, int, float, str, Path)), None)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    return words[one] if one else f"a {getattr(kind, '__name__', kind)}"


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def read_secret(path: Path) -> str:
    """The secret in a file, without the newline at its end; from then on it is blanked in everything this process writes down.

    `Refused('settings.secret')` if the file is missing, empty, far too large, or open to other users.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o007:
                raise Refused(
                    "settings.secret", f"secret file {path} may be read by every user (mode {mode:04o})", next_step=f"chmod 600 {path}"
                )
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Refused(
            "settings.secret", f"secret file {path} cannot be read: {error.strerror}", next_step="check the path and its owner"
        ) from error
    try:
        text = data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise Refused("settings.secret", f"secret file {path} is not text") from error
    if not text or len(data) > _MOST_BYTES:
        raise Refused("settings.secret", f"secret file {path} is {'empty' if not text else 'far too large'}")
    hide(text)
    return text
