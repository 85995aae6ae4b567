"""Which text can be the address of a node: a URL that everybody who is told of it can connect to."""

import re
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

HOST_CHARS_MAX: Final = 253
_NAME: Final = re.compile(r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")
_NUMBERS: Final = re.compile(r"[0-9.]+")


def is_host(text: str) -> bool:
    """Whether that can be a host: a name, or an IP address without brackets."""
    try:
        ip_address(text)
    except ValueError:
        return len(text) <= HOST_CHARS_MAX and bool(_NAME.fullmatch(text)) and not _NUMBERS.fullmatch(text)
    return True


def is_node_url(text: str) -> bool:
    """Whether that is http(s)://HOST[:PORT], with a path at most: nodes below a gateway have one."""
    if not text.isprintable() or " " in text:
        return False  # urlsplit would leave some of them out
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # a port that is no number, half an IPv6 address
        return False
    plain = parts.scheme in ("http", "https") and not any(c in text for c in "@?#")
    return plain and port != 0 and is_host(parts.hostname or "")


def listed_urls(text: str) -> list[str]:
    """The URLs of a setting, which names them with commas between; without the slash at an end."""
    return [url for u in text.split(",") if (url := u.strip().rstrip("/"))]


def is_address(text: str) -> bool:
    """Whether that is the URL of a node, or of a socket on its machine: unix:///PATH."""
    return is_node_url(text) or (text.startswith("unix:///") and text.isprintable())
