"""Keys and seals: one text per key, nothing of a seed in an error, and no byte of a sealed payload can change."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intertie.contracts.base import Contract, encode
from intertie.contracts.link import Sealed
from intertie.errors import Conflict, Refused
from intertie.trust.keys import Key, Kind, kind_of_public, raw_public, require_public, verify
from intertie.trust.seal import open_seal, seal

KINDS: list[tuple[Kind, str, str]] = [("O", "O", "SO"), ("A", "A", "SA"), ("U", "U", "SU")]


@pytest.mark.parametrize(("kind", "public", "seed"), KINDS)
def test_a_key_says_its_kind_in_both_texts_and_comes_back_from_its_seed(kind: Kind, public: str, seed: str) -> None:
    key = Key.new(kind)
    assert key.public.startswith(public) and len(key.public) == 56
    assert key.credentials_seed().startswith(seed) and len(key.credentials_seed()) == 58
    assert kind_of_public(key.public) == kind
    assert Key.parse(key.credentials_seed()).public == key.public


def test_a_known_seed_gives_the_public_key_that_nats_own_tools_give() -> None:
    # From the README of github.com/nats-io/nkeys.
    key = Key.parse("SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY")
    assert key.public == "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


@pytest.mark.parametrize("change", ["", "S", "X" * 58, "a" * 58, "SU" + "1" * 56])
def test_what_is_no_seed_is_refused_without_repeating_it(change: str) -> None:
    with pytest.raises(Refused) as error:
        Key.parse(change)
    assert error.value.code == "key.seed"
    assert len(change) < 2 or change not in str(error.value)


@given(at=st.integers(0, 57), letter=st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
def test_a_mistyped_seed_is_never_another_key(at: int, letter: str) -> None:
    seed = Key("U", bytes(range(32))).credentials_seed()
    changed = seed[:at] + letter + seed[at + 1 :]
    if changed != seed:
        with pytest.raises(Refused):
            Key.parse(changed)


def test_neither_repr_nor_pickle_gives_the_seed_away() -> None:
    key = Key.new("U")
    assert key.credentials_seed() not in repr(key) + str(key) + f"{key!r}"
    assert key.public in repr(key)
    with pytest.raises(TypeError):
        pickle.dumps(key)


def test_a_key_file_is_for_its_owner_only_and_is_never_overwritten(tmp_path: Path) -> None:
    file, key = tmp_path / "site.nk", Key.new("U")
    before = os.umask(0)
    try:
        key.write(file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o7777 == 0o600
    assert Key.read(file).public == key.public
    with pytest.raises(Conflict) as error:
        Key.new("U").write(file)
    assert error.value.code == "key.exists"
    assert Key.read(file).public == key.public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_seed_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "site.nk"
    Key.new("U").write(file)
    file.chmod(mode)
    with pytest.raises(Refused) as error:
        Key.read(file)
    assert error.value.code == "key.exposed" and str(file) in error.value.text


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused) as error:
        Key.read(tmp_path / "none.nk")
    assert error.value.code == "key.missing"


@given(data=st.binary(max_size=200), other=st.binary(max_size=200))
def test_a_signature_holds_for_its_bytes_and_its_key_only(data: bytes, other: bytes) -> None:
    key = Key("A", bytes(32))
    signature = key.sign(data)
    assert verify(key.public, data, signature)
    assert verify(key.public, other, signature) == (other == data)
    assert not verify(Key("A", bytes(31) + b"1").public, data, signature)


@pytest.mark.parametrize("public", ["", "U", "not a key", "U" * 56, "é" * 56])
def test_a_text_that_is_no_key_verifies_nothing(public: str) -> None:
    assert not verify(public, b"data", bytes(64))
    assert kind_of_public(public) is None
    with pytest.raises(Refused):
        raw_public(public)


@pytest.mark.parametrize("signature", [b"", b"short", bytes(64), bytes(65)])
def test_a_malformed_signature_is_no_signature(signature: bytes) -> None:
    assert not verify(Key.new("U").public, b"data", signature)


def test_a_key_of_another_kind_is_refused_with_what_it_was_for() -> None:
    with pytest.raises(Refused) as error:
        require_public(Key.new("U").public, "A", "the site's signing key")
    assert error.value.code == "key.public" and "the site's signing key" in error.value.text


class Note(Contract, frozen=True, kw_only=True):
    text: str


def test_what_was_sealed_comes_back() -> None:
    key, note = Key.new("U"), Note(text="作业 — ok")
    sealed = seal(key, encode(note), "scheduler")
    again = msgspec.json.decode(msgspec.json.encode(sealed), type=Sealed)
    assert open_seal(again, key.public, Note) == note
    assert sealed.signer == "scheduler" and "=" not in sealed.signature


@pytest.mark.parametrize(
    "change",
    [
        {"payload": '{"text":"b"}'},
        {"payload": '{"text": "a"}'},  # the same JSON in other bytes
        {"payload": '{"text":"a"} '},
        {"payload": "\ud800"},
        {"signature": ""},
        {"signature": "!!!"},
        {"signature": "é"},
        {"signature": "A" * 86},
    ],
)
def test_a_seal_with_anything_changed_is_refused(change: dict[str, str]) -> None:
    key = Key.new("U")
    sealed = msgspec.structs.replace(seal(key, encode(Note(text="a")), "scheduler"), **change)
    with pytest.raises(Refused) as error:
        open_seal(sealed, key.public, Note)
    assert error.value.code == "seal.invalid"


def test_a_seal_of_another_key_is_refused_whatever_it_calls_its_signer() -> None:
    key, thief = Key.new("U"), Key.new("U")
    with pytest.raises(Refused) as error:
        open_seal(seal(thief, encode(Note(text="a")), key.public), key.public, Note)
    assert error.value.code == "seal.invalid"


def test_a_good_seal_over_something_else_is_refused_after_the_signature_held() -> None:
    key = Key.new("U")
    with pytest.raises(Refused) as error:
        open_seal(seal(key, b'{"other":1}', "scheduler"), key.public, Note)
    assert error.value.code == "contract.invalid"
