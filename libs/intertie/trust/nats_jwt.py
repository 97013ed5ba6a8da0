"""NATS JWTs (version 2): who exists on the bus, and what each may say there.

The hub's account only *exports*. Every import stands in a site's account, with the site's name put in by the server, so that no site can
speak in another's name whatever it writes. Inside the hub's account a table gives each service its own subjects and no more. A site's
agent signs its own user JWTs with a scoped signing key: what they may do stands in the account (the template), not in the user.
Claims are NATS' own (github.com/nats-io/jwt/v2); a user JWT under a scoped key must carry no permissions.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from intertie.contracts.base import EVENT_STREAM, PREFIX, TELEMETRY_STREAM
from intertie.contracts.link import Lane
from intertie.errors import Refused
from intertie.ids import CANARY, SiteName, name
from intertie.trust.keys import Key, raw_public, require_public, verify

# One NATS payload: a batch is at most a quarter of it.
SITE_PAYLOAD = 1024 * 1024
# Inbox, ask, nudge, and the same again while a renewed connection overlaps the old one.
SITE_SUBSCRIPTIONS = 32
# The agent's connection, the new one beside it at renewal, a node's, and a person who looks.
SITE_CONNECTIONS = 8
# How long the server remembers where to let an answer through: longer than any call waits (`bus.rpc`: 30 s).
REPLY_TTL_NS = 60_000_000_000
# Minutes: a stolen credential dies soon, and the agent mints the next without asking anyone.
SITE_USER_SECONDS = 900
# The hub's JetStream: the public event stream on disk, one last value per node in memory.
HUB_JETSTREAM_MEMORY = 128 * 1024 * 1024
HUB_JETSTREAM_DISK = 3 * 1024 * 1024 * 1024
HUB_STREAMS = 8
HUB_CONSUMERS = 256

INBOX = "_INBOX"
"""A site's users are alone in their account and share one inbox. In the hub's account each service has its own below it: whoever could hear
`_INBOX.>` there would hear every answer to every other service, and with them the claims that identity signs (field case BR-128)."""

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Permissions:
    """What a hub service may publish and subscribe. Answers to requests it received are let through beside these."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def _events(service: str) -> Permissions:
    """The public record: say its own events, and keep its own place (a durable of its own name) in everybody's.

    Making the stream, and deleting one that was wiped under a running server, is identity's alone (`_STREAM_MAKER`): a stolen credential of
    another service can publish its own events and no more. One that finds the stream mute says so on its own `mute` subject.
    """
    stream = EVENT_STREAM
    return Permissions(
        publish=(
            f"{PREFIX}.evt.{service}.>",
            f"{PREFIX}.heads.{service}",
            f"{PREFIX}.mute.{service}",
            "$JS.API.INFO",
            f"$JS.API.STREAM.INFO.{stream}",
            f"$JS.API.CONSUMER.CREATE.{stream}.{service}",
            f"$JS.API.CONSUMER.CREATE.{stream}.{service}.>",
            *(f"$JS.API.CONSUMER.{verb}.{stream}.{service}" for verb in ("INFO", "MSG.NEXT")),
            # Both forms of an acknowledgement: the newer one names domain and account before the stream.
            f"$JS.ACK.{stream}.{service}.>",
            f"$JS.ACK.*.*.{stream}.{service}.>",
        ),
        subscribe=(f"{PREFIX}.heads.>",),
    )


def _telemetry() -> Permissions:
    """The stream of last values: made, read by a short-lived consumer that acknowledges nothing, never published to by a service."""
    stream = TELEMETRY_STREAM
    return Permissions(
        publish=(
            *(f"$JS.API.STREAM.{verb}.{stream}" for verb in ("INFO", "CREATE", "UPDATE")),
            f"$JS.API.CONSUMER.CREATE.{stream}.>",
            *(f"$JS.API.CONSUMER.{verb}.{stream}.*" for verb in ("INFO", "DELETE")),
        ),
        subscribe=(f"{PREFIX}.tel.gpu.>",),
    )


def _lane(lane: Lane) -> Permissions:
    """A keeper's lane, and the nudge that asks for an early sync of it."""
    return Permissions(publish=(f"{PREFIX}.down.*.nudge",), subscribe=(f"{PREFIX}.up.*.{lane}.sync",))


def _commands(*services: str) -> Permissions:
    """Whose commands it calls."""
    return Permissions(publish=tuple(f"{PREFIX}.cmd.{service}.*" for service in services), subscribe=())


_STREAM_MAKER = Permissions(
    publish=tuple(f"$JS.API.STREAM.{verb}.{EVENT_STREAM}" for verb in ("CREATE", "UPDATE", "DELETE")), subscribe=(f"{PREFIX}.mute.*",)
)
"""Makes the public record, and makes it anew; hears who finds it mute."""

_ANCHOR = Permissions(publish=(f"{PREFIX}.cmd.identity.anchor_audit",), subscribe=())
"""Hands the head of its audit chain to identity."""

_ASK = Permissions(publish=(f"{PREFIX}.down.*.ask",), subscribe=(f"{PREFIX}.up.*.answer",))
_LIVE_EVENTS = Permissions(publish=(), subscribe=(f"{PREFIX}.evt.>",))
_CALLS = Permissions(publish=(f"{PREFIX}.down.*.call",), subscribe=(f"{PREFIX}.up.*.call.*",))
"""Calls of sites' offerings: frames down, and every site's frames up, in which the server has put the site's name."""

BEYOND_COMMON: Mapping[str, tuple[Permissions, ...]] = {
    "registry": (_lane(Lane.REGISTRY), _commands("incident"), _ANCHOR),
    "scheduler": (_lane(Lane.SCHEDULER), _ASK, _telemetry(), _commands("incident"), _ANCHOR),
    "metering": (_lane(Lane.METERING), _commands("incident"), _ANCHOR),
    "identity": (_STREAM_MAKER, _commands("registry", "incident"), _ANCHOR),
    "incident": (_ANCHOR,),
    # It calls with its users' claims; what these may do is judged by the called service.
    "gateway": (_LIVE_EVENTS, _CALLS, _commands("registry", "scheduler", "metering", "identity", "incident")),
}
"""What each service does on the bus beside the common part: the reason for every other subject is in `_common`."""


def _common(service: str) -> Permissions:
    """Answer its own calls as a micro service, ask any other's queries, and receive answers in an inbox that no other service hears."""
    return Permissions(
        publish=(f"{PREFIX}.qry.*.*",),
        subscribe=(f"{PREFIX}.qry.{service}.*", f"{PREFIX}.cmd.{service}.*", "$SRV.>", f"{INBOX}.{service}.>"),
    )


def permissions_of(service: str) -> Permissions:
    """Everything that a hub service may say and hear; `Refused('bus.no_such_service')` for a service without a row."""
    if service not in BEYOND_COMMON:
        raise Refused("bus.no_such_service", f"{service[:60]!r} has no row in the table of bus permissions")
    parts = (_common(service), _events(service), *BEYOND_COMMON[service])
    return Permissions(
        publish=tuple(sorted({subject for part in parts for subject in part.publish})),
        subscribe=tuple(sorted({subject for part in parts for subject in part.subscribe})),
    )


# The server is asked for its accounts and told new ones; nothing else of the system account is needed.
SYSTEM_PERMISSIONS = Permissions(
    publish=("$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.CLAIMS.LIST", "$SYS.REQ.ACCOUNT.*.CLAIMS.LOOKUP", "$SYS.REQ.ACCOUNT.*.CONNZ"),
    subscribe=(f"{INBOX}.system.>", "$SYS.ACCOUNT.*.CONNECT", "$SYS.ACCOUNT.*.DISCONNECT"),
)

REVOKED_TAG = "revoked-signing-key:"

# What the agent's users may do in their site's account; the names are local, the server adds prefix and site.
SITE_ROLE = "agent"
SITE_TEMPLATE: Json = {
    "pub": {"allow": ["up.*.sync", "up.answer", "up.call.*", "tel.gpu.*"]},
    "sub": {"allow": [f"{INBOX}.>", "down.*"]},
    "subs": SITE_SUBSCRIPTIONS,
    "data": -1,
    "payload": SITE_PAYLOAD,
}

SITE_LIMITS: Json = {"conn": SITE_CONNECTIONS, "subs": SITE_CONNECTIONS * SITE_SUBSCRIPTIONS, "payload": SITE_PAYLOAD, "exports": 0}


# --- the JWTs ----------------------------------------------------------------------------------------------------------------------------


def operator(key: Key, system_account: str, now: datetime, title: str = "intertie") -> str:
    """The operator's own claims, for the server's configuration."""
    require_public(system_account, "A", "the system account")
    return _sign(key, key.public, title, now, {"type": "operator", "system_account": system_account})


def system_account(operator_key: Key, public: str, now: datetime) -> str:
    """The account in which the server answers for itself. No JetStream."""
    return _account(operator_key, public, "SYS", now)


def hub_account(operator_key: Key, public: str, now: datetime) -> str:
    """The account of the hub's services: exports for sites, JetStream, no imports."""
    exports = [
        {"name": "lane", "subject": f"{PREFIX}.up.*.*.sync", "type": "service", "response_type": "Singleton"},
        {"name": "answer", "subject": f"{PREFIX}.up.*.answer", "type": "service", "response_type": "Singleton"},
        {"name": "call", "subject": f"{PREFIX}.up.*.call.*", "type": "service", "response_type": "Singleton"},
        # A service and not a stream: the import then puts the site's name in, and a publish without reply costs no answer.
        {"name": "telemetry", "subject": f"{PREFIX}.tel.gpu.*.*", "type": "service", "response_type": "Singleton"},
        {"name": "down", "subject": f"{PREFIX}.down.*.*", "type": "stream"},
    ]
    jetstream = {
        "mem_storage": HUB_JETSTREAM_MEMORY,
        "disk_storage": HUB_JETSTREAM_DISK,
        "streams": HUB_STREAMS,
        "consumer": HUB_CONSUMERS,
    }
    return _account(operator_key, public, "HUB", now, limits=jetstream, exports=exports)


def site_account(
    operator_key: Key, site: SiteName, account: str, hub: str, signing_keys: Sequence[str], now: datetime, revoked: Sequence[str] = ()
) -> str:
    """One site's account. With no signing key nobody can log in and whoever is logged in is dropped: that is how a site is revoked.

    account, hub: public account keys. signing_keys: public halves (`A…`) of keys that the site made and keeps. revoked: those taken away
    before, named in the account's tags, so that an identity restored from a backup can learn of them from the server (LINK D18).
    """
    name(site, "site")
    for key in signing_keys:
        require_public(key, "A", "the site's signing key")
    scoped = [{"kind": "user_scope", "key": key, "role": SITE_ROLE, "template": SITE_TEMPLATE} for key in sorted(signing_keys)]
    tags = [f"{REVOKED_TAG}{key}" for key in sorted(revoked)]
    parts = {"signing_keys": scoped, **({"tags": tags} if tags else {})}
    return _account(operator_key, account, site, now, limits=SITE_LIMITS, imports=_site_imports(site, hub), **parts)


def canary_account(operator_key: Key, account: str, hub: str, now: datetime) -> str:
    """The canary's account: a site's imports and nothing else of one. It stands in the preload file and in no list of sites, so nobody revokes it."""
    return _account(operator_key, account, CANARY, now, limits=SITE_LIMITS, imports=_site_imports(CANARY, hub))


def canary_user(account_key: Key, user: str, now: datetime) -> str:
    """The user with which the scheduler's leader speaks on its own lane as a site does, to know that it can hear (LINK D5)."""
    allowed = Permissions(publish=(f"up.{Lane.SCHEDULER}.sync",), subscribe=(f"{INBOX}.>",))
    return _user(account_key, CANARY, user, now, allowed, answers=False)


def _site_imports(site: SiteName, hub: str) -> list[Json]:
    """What a site's account takes from the hub's, with the site's name put in by the server."""
    require_public(hub, "A", "the hub's account")

    def service(title: str, subject: str, local: str) -> Json:
        return {"name": title, "account": hub, "subject": subject, "local_subject": local, "type": "service"}

    return [
        *(service(f"lane-{lane}", f"{PREFIX}.up.{site}.{lane}.sync", f"up.{lane}.sync") for lane in Lane),
        service("answer", f"{PREFIX}.up.{site}.answer", "up.answer"),
        service("call", f"{PREFIX}.up.{site}.call.*", "up.call.*"),
        service("telemetry", f"{PREFIX}.tel.gpu.{site}.*", "tel.gpu.*"),
        {"name": "down", "account": hub, "subject": f"{PREFIX}.down.{site}.*", "local_subject": "down.*", "type": "stream"},
    ]


def service_user(hub_key: Key, service: str, user: str, now: datetime) -> str:
    """A hub service's own user, with the rights of its row in the table."""
    return _user(hub_key, service, user, now, permissions_of(service), answers=True)


def system_user(system_key: Key, user: str, now: datetime) -> str:
    """Identity's user in the system account: lists and pushes accounts."""
    return _user(system_key, "system", user, now, SYSTEM_PERMISSIONS, answers=False)


def mint_site_user(signing_key: Key, account: str, user: str, now: datetime, seconds: int = SITE_USER_SECONDS) -> str:
    """The agent's own credential, minted offline. `now` is the site's clock: the server judges `exp` by its own."""
    require_public(account, "A", "the site's account")
    return _sign(signing_key, user, SITE_ROLE, now, {"type": "user", "issuer_account": account}, expires_s=seconds)


def credentials(jwt: str, user_key: Key) -> str:
    """A `.creds` file: the JWT and the seed of its user. A secret."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user_key.credentials_seed()}\n------END USER NKEY SEED------\n"
    )


@dataclass(frozen=True, slots=True)
class Issued:
    """What a JWT says of itself; enough to know whether the server holds an older one."""

    subject: str
    issuer: str
    title: str
    at: int
    """UTC seconds of signing."""
    nats: Json


def revoked_keys(account: Issued) -> list[str]:
    """Signing keys that a site's account names as taken away."""
    tags = account.nats.get("tags", [])
    return [str(tag).removeprefix(REVOKED_TAG) for tag in tags if str(tag).startswith(REVOKED_TAG)] if isinstance(tags, list) else []


def inbox_of(jwt: str | bytes) -> str:
    """Below which subject a user with this JWT is answered: the inbox that its permissions name, else everybody's. The signature is not
    looked at: the server judges it, and a wrong inbox only makes its user deaf."""
    try:
        text = jwt.decode("ascii") if isinstance(jwt, bytes) else jwt
        allowed = json.loads(_unb64(text.split(".")[1]))["nats"]["sub"]["allow"]
        return next(str(subject).removesuffix(".>") for subject in allowed if str(subject).startswith(f"{INBOX}."))
    except (ValueError, KeyError, TypeError, IndexError, StopIteration, binascii.Error):
        return INBOX


def may_publish(jwt: str | bytes, subject: str) -> bool:
    """Whether a user's JWT itself allows this subject, word by word; True where it names no permissions, and the server decides."""
    try:
        text = jwt.decode("ascii") if isinstance(jwt, bytes) else jwt
        allowed = json.loads(_unb64(text.split(".")[1]))["nats"].get("pub", {}).get("allow")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, binascii.Error):
        return True
    return allowed is None or subject in allowed


def read(jwt: str) -> Issued:
    """The claims of a JWT whose own signature holds. `Refused('jwt.invalid')`: shape, signature or fields."""
    try:
        head, body, signature = jwt.split(".")
        claims = json.loads(_unb64(body))
        issued = Issued(str(claims["sub"]), str(claims["iss"]), str(claims["name"]), int(claims["iat"]), dict(claims["nats"]))
        fits = verify(issued.issuer, f"{head}.{body}".encode("ascii"), _unb64(signature))
    except (ValueError, KeyError, TypeError, binascii.Error) as err:
        raise Refused("jwt.invalid", "this is not a NATS JWT") from err
    if not fits:
        raise Refused("jwt.invalid", "the signature of this NATS JWT does not fit its issuer")
    return issued


# --- writing -----------------------------------------------------------------------------------------------------------------------------

_UNLIMITED: Json = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": 0}


def _account(operator_key: Key, public: str, title: str, now: datetime, *, limits: Json | None = None, **parts: object) -> str:
    require_public(public, "A", f"the account {title}")
    claims = {"type": "account", "limits": {**_UNLIMITED, **(limits or {})}, "default_permissions": {"pub": {}, "sub": {}}, **parts}
    return _sign(operator_key, public, title, now, claims)


def _user(account_key: Key, title: str, user: str, now: datetime, allowed: Permissions, *, answers: bool) -> str:
    claims: dict[str, object] = {
        "type": "user",
        "pub": {"allow": list(allowed.publish)},
        "sub": {"allow": list(allowed.subscribe)},
        "subs": -1,
        "data": -1,
        "payload": -1,
    }
    if answers:
        # Without it a reply to `_R_.…` (a service import's) is dropped without a word, and every lane times out.
        claims["resp"] = {"max": 1, "ttl": REPLY_TTL_NS}
    return _sign(account_key, user, title, now, claims)


def _sign(key: Key, subject: str, title: str, now: datetime, nats: Json, *, expires_s: int | None = None) -> str:
    raw_public(subject)
    issued = int(now.timestamp())
    claims: dict[str, object] = {"iat": issued, "iss": key.public, "name": title, "sub": subject, "nats": {**nats, "version": 2}}
    if expires_s is not None:
        claims["exp"] = issued + expires_s
    # The server treats equal ids as the same claims, so the id is the content's hash.
    claims["jti"] = base64.b32encode(hashlib.sha256(_json(claims)).digest()).decode("ascii").rstrip("=")
    signed = f"{_b64(_json({'typ': 'JWT', 'alg': 'ed25519-nkey'}))}.{_b64(_json(claims))}"
    return f"{signed}.{_b64(key.sign(signed.encode('ascii')))}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode("utf-8")


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode("ascii").rstrip("=")


def _unb64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
