"""The first operator: where nobody is operator yet, a token is made and written to a file that only its owner may read.

The file comes before the database row, so that a crash between the two leaves a token that the next start makes valid, never an operator whose
token nobody has.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from intertie.contracts.identity import CreateToken, Role
from intertie.errors import Refused, Unauthenticated
from intertie.identity.accounts import replace_file
from intertie.identity.core import people
from intertie.identity.store import IdentityStore
from intertie.ids import PrincipalId
from intertie.observe import log
from intertie.settings import read_secret
from intertie.trust import tokens

LOG = log.get("identity.bootstrap")

FILE = "admin.token"
# A year: long enough to set up OIDC or other people's tokens, and it ends by itself.
VALID_DAYS = 365


async def ensure_operator(store: IdentityStore, folder: Path, now: datetime) -> bool:
    """True if a first operator was made just now; its token lies in `folder/admin.token` (0600). Repeatable."""
    if await store.has_operator(now=now):
        return False
    file = folder / FILE
    text = _left_by_a_crash(file)
    if text is None or (await store.token(tokens.token_id(text, tokens.API)))[0] is not None:
        # Nothing is there, or a token that was revoked or has expired: it never comes back.
        text = tokens.new_token(tokens.API).text
        replace_file(file, text + "\n")
    request = CreateToken(name="admin", roles=[Role.OPERATOR], valid_days=VALID_DAYS)
    record = people.grant(request, id=tokens.token_id(text, tokens.API), principal=PrincipalId("admin"), now=now)
    made = await store.add_first_operator(record, tokens.token_digest(text), now=now)
    if made:
        LOG.info("the first operator's token was written", file=str(file))
    return made


def _left_by_a_crash(file: Path) -> str | None:
    """A well-formed token that lies there already; None if there is none. What is no token is not overwritten: `Refused`."""
    if not file.exists():
        return None
    text = read_secret(file)
    try:
        tokens.token_id(text, tokens.API)
    except Unauthenticated as err:
        raise Refused("identity.admin_token", f"{file} is in the way and holds no API token", next_step=f"move {file} away") from err
    return text
