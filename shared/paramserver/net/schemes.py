"""Finds out whether a URL that does not answer has the wrong scheme, http for https or the reverse."""

import socket
import ssl
from typing import Final
from urllib.parse import urlsplit

from paramserver.net.connect import connect

_ASKED: Final = b"HEAD /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
_PORTS: Final = {"http": 80, "https": 443}
_OTHER: Final = {"http": "https", "https": "http"}


def in_scheme_spoken(url: str, timeout_s: float) -> str:
    """Return the URL, with the other scheme if that is the one its server speaks."""
    parts = urlsplit(url)
    scheme = parts.scheme
    try:
        with connect(parts.hostname or "", parts.port or _PORTS[scheme], timeout_s) as connected:
            connected.settimeout(timeout_s)
            said = _answers(connected) if scheme == "https" else _shakes_hands(connected, parts.hostname)
    except (OSError, KeyError):
        return url
    return parts._replace(scheme=_OTHER[scheme]).geturl() if said else url


def _answers(connected: socket.socket) -> bool:
    connected.sendall(_ASKED)
    return connected.recv(5) == b"HTTP/"


def _shakes_hands(connected: socket.socket, host: str | None) -> bool:
    """Return True if a TLS handshake succeeds, else raise OSError.

    The certificate is not verified, because no request is sent and no answer trusted.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(connected, server_hostname=host):
        return True
