"""Access tokens: a role and a name in plain text, authenticated by a MAC under the secret that the nodes share.

    ps1.ROLE.NAME.EXPIRES.MAC        EXPIRES in seconds since 1970, 0 for never

No node stores tokens: it recomputes the MAC and compares it in constant time.  So nothing but the secret can be stolen
at rest, and a node that has the secret needs no list.  This module uses only the standard library, and no clock.
"""

import hmac
import re
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from paramserver.errors import problem
from paramserver_node.roles import ROLES, Role

TOKEN_CHARS_MAX: Final = 256
KEY_CHARS_MIN: Final = 32
KEYS_MAX: Final = 2
"""The key that signs, and one more that is still (or already) accepted while the secret is being changed."""
POOL: Final = "pool"
"""Name of the worker pool's token; that of `psctl token worker` is the role's, so that it can be revoked by itself."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EXPIRES: Final = re.compile(r"0|[1-9][0-9]{0,11}")
_FORMAT: Final = "ps1"
_CODE_FORMAT: Final = "ps1-once"


@dataclass(frozen=True, slots=True)
class Holder:
    """The bearer of a token, as the token states it."""

    role: Role
    name: str
    expires_at_s: int
    """Seconds since 1970; 0: never."""


def new_key() -> str:
    """Return a key of 256 random bits, as text."""
    return secrets.token_urlsafe(32)


def keys_of(secret: str) -> tuple[bytes, ...]:
    """Return the keys of a secret, one per line: the first signs, all are accepted; none for an empty text.

    Raises RequestError (`invalid_field`) for a key so short that it could be guessed, or for more than two.
    """
    keys = secret.split()
    if any(len(k) < KEY_CHARS_MIN for k in keys):
        raise problem(
            "invalid_field",
            f"each line of the secret must be a key of at least {KEY_CHARS_MIN} random characters",
            hint="psctl secret FILE makes one",
        )
    if len(keys) > KEYS_MAX:
        raise problem("invalid_field", f"the secret has {len(keys)} keys; {KEYS_MAX} are accepted at the same time")
    return tuple(k.encode() for k in keys)


def is_name(text: str) -> bool:
    """Return whether a token can have this name: 1 to 64 letters, digits, `_` and `-`."""
    return _NAME.fullmatch(text) is not None


def make(key: bytes, role: Role, name: str = "", expires_at_s: int = 0) -> str:
    """Return a token; the same arguments give the same one.

    `name` has 1 to 64 letters, digits, `_` and `-`; it identifies the token, also for revoking it; default: the role.

    Raises RequestError (`invalid_field`) for any other name, or a role that needs no token.
    """
    name = name or role
    if role not in ROLES or role == "open":
        raise problem("invalid_field", f"no token has the role '{role:.40}'", hint="reader, worker, node or admin")
    if not is_name(name):
        raise problem("invalid_field", f"a token's name has 1 to 64 letters, digits, '_' and '-'; not {name!r:.80}")
    payload = f"{_FORMAT}.{role}.{name}.{expires_at_s}"
    return f"{payload}.{_mac(key, payload)}"


def of_secret(secret: str, role: Role, name: str = "") -> str | None:
    """Return a token signed with the first key of a secret; None for an empty text.  Raises like `keys_of`."""
    keys = keys_of(secret)
    return make(keys[0], role, name) if keys else None


def read(token: str, keys: Iterable[bytes], now_s: float) -> Holder | None:
    """Return the holder of a token; None if no key made it or it has expired."""
    payload, _, mac = token.rpartition(".")
    parts = payload.split(".")
    if len(token) > TOKEN_CHARS_MAX or len(parts) != 4 or not token.isascii() or parts[0] != _FORMAT:
        return None
    _, role, name, expires = parts
    # All keys are tried, even if the first one matches, so that the time taken reveals nothing.
    made = [hmac.compare_digest(_mac(key, payload), mac) for key in keys]
    if not any(made) or role not in ROLES[1:] or not is_name(name) or not _EXPIRES.fullmatch(expires):
        return None
    holder = Holder(role, name, int(expires))
    return holder if not holder.expires_at_s or now_s < holder.expires_at_s else None


def make_code(key: bytes, expires_at_s: int) -> str:
    """Return a new code for one login, which every node that has the key can check; it is no token."""
    payload = f"{_CODE_FORMAT}.{secrets.token_urlsafe(12)}.{expires_at_s}"
    return f"{payload}.{_mac(key, payload)}"


def code_expires_at_s(code: str, keys: Iterable[bytes]) -> int | None:
    """Return when a code of `make_code` expires, in seconds since 1970; None if no key made it."""
    payload, _, mac = code.rpartition(".")
    if len(code) > TOKEN_CHARS_MAX or not code.isascii() or not payload.startswith(f"{_CODE_FORMAT}."):
        return None
    made = [hmac.compare_digest(_mac(key, payload), mac) for key in keys]  # all keys, as in `read`
    return int(payload.rpartition(".")[2]) if any(made) else None


def _mac(key: bytes, payload: str) -> str:
    return urlsafe_b64encode(hmac.digest(key, payload.encode(), "sha256")).rstrip(b"=").decode()
