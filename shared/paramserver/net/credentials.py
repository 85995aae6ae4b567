"""A client's credentials: its bearer token, and the certificate authorities it trusts."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paramserver.errors import problem

if TYPE_CHECKING:
    import ssl

ENV_TOKEN: Final = "PARAMSERVER_TOKEN"
ENV_CA: Final = "PARAMSERVER_CA"
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A bearer token, and certificates trusted in addition to the system's."""

    token: str = field(default="", repr=False)
    """Empty: none is sent."""
    authorities: tuple[str, ...] = field(default=(), repr=False)
    """Certificates in PEM format."""

    @classmethod
    def of(cls, token: str | None, ca: str | os.PathLike[str] | None, *, origin: str = "ca") -> "Credentials":
        """Return credentials from a token and a file of certificates, both optional; errors name the file by `origin`.

        Raises RequestError (`invalid_field`) for a file without certificates, or a token that cannot be a header value.
        """
        token = token or ""
        if not isinstance(token, str) or not is_token(token := token.strip()):
            raise problem("invalid_field", "a token is one word of ASCII characters", hint="psctl token prints one")
        return cls(token, _authorities(os.fspath(ca), origin) if ca else ())

    @classmethod
    def found(
        cls, token: str | None, ca: str | os.PathLike[str] | None, environment: Mapping[str, str]
    ) -> "Credentials":
        """Return those given, else those of PARAMSERVER_TOKEN (or the file PARAMSERVER_TOKEN_FILE) and PARAMSERVER_CA.

        Raises RequestError (`invalid_field`) like `of`, and for a token file that is empty or cannot be read.
        """
        token = token or environment.get(ENV_TOKEN)
        if not token and (path := environment.get(f"{ENV_TOKEN}_FILE")):
            token = text_of(path, f"{ENV_TOKEN}_FILE")
            if not token.strip():
                raise problem("invalid_field", f"{ENV_TOKEN}_FILE: {path} is empty", hint="psctl token prints a token")
        return cls.of(token, ca or environment.get(ENV_CA), origin="ca" if ca else ENV_CA)

    @property
    def headers(self) -> dict[str, str]:
        """The header that carries the token, if there is one."""
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    def context(self) -> "ssl.SSLContext":
        """Return an SSL context for clients of the standard library that trusts these authorities too."""
        import ssl  # imported only where used: it takes some milliseconds

        context = ssl.create_default_context()
        for certificate in self.authorities:
            context.load_verify_locations(cadata=certificate)
        return context


def is_token(text: str) -> bool:
    """Whether `text` can be sent as a token in a header; an empty string, meaning no token, is accepted."""
    return text.isascii() and text.isprintable() and " " not in text


def _authorities(path: str, origin: str) -> tuple[str, ...]:
    found = tuple(_CERTIFICATE.findall(text_of(path, origin)))
    if not found:
        raise problem("invalid_field", f"{origin}: {path} holds no certificate in PEM")
    return found


def text_of(path: str, origin: str) -> str:
    """Return the text of a file that `origin` names.  Raises RequestError (`invalid_field`) if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise problem("invalid_field", f"{origin}: cannot read {path}: {e}") from None
