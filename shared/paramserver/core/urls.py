"""Validation of node addresses: URLs to which every process that learns of them can connect."""

import re
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

DEFAULT_URL: Final = "http://127.0.0.1:8700"
"""Where a scheduler is that was started without options."""
HOST_CHARS_MAX: Final = 253
_NAME: Final = re.compile(r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")
_NUMBERS: Final = re.compile(r"[0-9.]+")


def is_host(text: str) -> bool:
    """Whether the text can be a host: a name, or an IP address without brackets."""
    try:
        ip_address(text)
    except ValueError:
        return len(text) <= HOST_CHARS_MAX and bool(_NAME.fullmatch(text)) and not _NUMBERS.fullmatch(text)
    return True


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an IP address without brackets, is this machine and can be reached from here only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_node_url(text: str) -> bool:
    """Whether the text is http(s)://HOST[:PORT], optionally with a path, as nodes behind a gateway have."""
    if not text.isprintable() or " " in text:
        return False  # urlsplit would drop some of these characters
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # the port is not a number, or an IPv6 address is incomplete
        return False
    plain = parts.scheme in ("http", "https") and not any(c in text for c in "@?#")
    return plain and port != 0 and is_host(parts.hostname or "")


def listed_urls(text: str) -> list[str]:
    """Return the URLs of a comma-separated setting, without trailing slashes."""
    return [url for u in text.split(",") if (url := u.strip().rstrip("/"))]


def is_address(text: str) -> bool:
    """Whether the text is the URL of a node, or of a Unix socket on its machine: unix:///PATH."""
    return is_node_url(text) or (text.startswith("unix:///") and text.isprintable())
