"""Where the hub is and who you are: environment first, then the file that `intertie login` wrote (0600)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from intertie.errors import Refused, Unauthenticated


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """One hub and a token for it."""

    url: str
    token: str = ""


def config_dir() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "intertie"


def state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "intertie"


def login_file() -> Path:
    return config_dir() / "login.json"


def save_login(login: Login) -> Path:
    """Write the login for this user only."""
    path = login_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(msgspec.json.encode(login))
    fresh.replace(path)
    return path


def load_login() -> Login:
    """The hub to talk to. `Refused('cli.no_hub')` if none is known; a login file others can read is refused."""
    url, token = os.environ.get("INTERTIE_URL", ""), os.environ.get("INTERTIE_TOKEN", "")
    if token_file := os.environ.get("INTERTIE_TOKEN_FILE"):
        token = Path(token_file).read_text(encoding="utf-8").strip()
    stored = _stored() if not (url and token) else None
    if stored is not None:
        # A token belongs to its hub: it is not sent to another one that only the environment names.
        if not url or url.rstrip("/") == stored.url:
            url, token = url or stored.url, token or stored.token
    if not url:
        raise Refused("cli.no_hub", "no hub is known here", next_step="intertie login --url https://hub.example, or set INTERTIE_URL")
    return Login(url=url.rstrip("/"), token=token)


def _stored() -> Login | None:
    path = login_file()
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if stat.S_IMODE(mode) & 0o077:
        raise Unauthenticated("cli.login_readable", f"{path} can be read by others", next_step=f"chmod 600 {path}")
    try:
        return msgspec.json.decode(data, type=Login)
    except msgspec.MsgspecError as err:
        raise Refused("cli.login_broken", f"{path} cannot be read: {err}", next_step="intertie login") from err
