"""Access tokens: which ones are valid, and that nothing else is."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.errors import RequestError
from paramserver_node import tokens
from paramserver_node.roles import ROLES, Role

KEY, OTHER = b"k" * 43, b"o" * 43
NAMES = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64)


@given(st.sampled_from(ROLES[1:]), NAMES, st.integers(0, 10**11))
def test_a_token_says_what_it_was_made_with(role: Role, name: str, expires_at_s: int) -> None:
    """A token gives its role, name and expiry under the key that made it, first or second, and under no other."""
    token = tokens.make(KEY, role, name, expires_at_s)

    assert tokens.read(token, [OTHER, KEY], -1.0) == tokens.Holder(role, name, expires_at_s)
    assert tokens.read(token, [OTHER], -1.0) is None
    assert tokens.read(token, [], -1.0) is None


@given(st.data())
def test_no_other_text_counts(data: st.DataObject) -> None:
    """A token of which one character was changed, dropped or added is refused."""
    token = tokens.make(KEY, "worker", "ci", 2_000_000_000)
    at = data.draw(st.integers(0, len(token) - 1))
    character = data.draw(st.characters().filter(lambda c: c != token[at]))
    changed = token[:at] + character + token[at + 1 :]

    for text in (changed, token[:at] + token[at + 1 :], token[:at] + character + token[at:]):
        assert tokens.read(text, [KEY], 0.0) is None
    assert tokens.read(token, [KEY], 0.0) is not None


def test_a_role_cannot_be_raised() -> None:
    """An admin's token with the MAC of a worker's token is refused."""
    worker, admin = (tokens.make(KEY, role, "x") for role in ("worker", "admin"))
    forged = admin.rpartition(".")[0] + "." + worker.rpartition(".")[2]

    assert tokens.read(forged, [KEY], 0.0) is None


@pytest.mark.parametrize("text", ["", ".", "....", "ps1.admin.x.0.", "ps2.admin.x.0.abc", "é" * 50, "a" * 5000])
def test_what_is_no_token_is_refused(text: str) -> None:
    """Text that is not in the form of a token is refused without an exception."""
    assert tokens.read(text, [KEY], 0.0) is None


def test_a_token_ends_when_it_says() -> None:
    """A token is valid until the second of its expiry, and for ever if that is 0."""
    token = tokens.make(KEY, "reader", "x", 1000)

    assert tokens.read(token, [KEY], 999.9) is not None
    assert tokens.read(token, [KEY], 1000.0) is None
    assert tokens.read(tokens.make(KEY, "reader"), [KEY], 1e12) is not None


def test_the_same_words_give_the_same_token() -> None:
    """The same key, role and name give the same token, and only new keys are random."""
    assert tokens.make(KEY, "admin") == tokens.make(KEY, "admin", "admin") != tokens.make(OTHER, "admin")
    assert tokens.new_key() != tokens.new_key()


@pytest.mark.parametrize("name", ["a.b", "a b", "ü", "x" * 65])
def test_names_that_would_break_a_token_are_refused(name: str) -> None:
    """A name with a dot, a space, a non-ASCII character or more than 64 characters is refused."""
    with pytest.raises(RequestError, match="name"):
        tokens.make(KEY, "reader", name)


def test_a_secret_has_one_or_two_long_keys() -> None:
    """A secret has one key, or two while it is being changed; a short key or a third is refused."""
    one, two = tokens.new_key(), tokens.new_key()

    assert tokens.keys_of("") == tokens.keys_of(" \n") == ()
    assert tokens.keys_of(f"{one}\n{two}\n") == (one.encode(), two.encode())
    for bad in ("password", f"{one}\nshort", f"{one} {two} {tokens.new_key()}"):
        with pytest.raises(RequestError) as e:
            tokens.keys_of(bad)
        assert one not in str(e.value)
    with pytest.raises(RequestError, match="no token has the role"):
        tokens.make(one.encode(), "open")
