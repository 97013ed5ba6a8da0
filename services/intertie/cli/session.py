"""The hub as the commands use it: a client for the known login, after what waited in the outbox was sent."""

from __future__ import annotations

from intertie.cli import outbox
from intertie.cli.client import Client
from intertie.cli.config import load_login
from intertie.cli.out import note
from intertie.text import language, say


def connect(*, send_waiting: bool = True) -> Client:
    """A client; submits made while the hub was away are sent first, and said."""
    client = Client(load_login())
    if send_waiting and outbox.waiting():
        for sent in outbox.send(client):
            key = "cli.outbox_sent" if sent.job else "cli.outbox_refused"
            note(say(key, language(), name=sent.name, job=sent.job, error=sent.error))
    return client
