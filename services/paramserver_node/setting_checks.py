"""Plausibility checks of settings, so that a wrong value is reported where it was set, and not far from there."""

import logging
import re
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from paramserver.core.urls import is_host, is_node_url, listed_urls
from paramserver.errors import PsError, problem
from paramserver.limits import MIB
from paramserver.net.credentials import Credentials, is_token

ADVERTISED_MAX: Final = 15
"""URLs of one shard; together with its socket, as many as it may join with."""
URL_CHARS_MAX: Final = 255
MEMORY_BYTES_MIN: Final = 64 * MIB
"""A process needs more than this before it holds any data."""
MEMORY_BYTES_MAX: Final = 1 << 53
SNAPSHOT_MIB_PER_S: Final = (0.001, 1e6)
STOP_S: Final = (10.0, 86_400.0)
TIMEOUT_S_MAX: Final = 1e9

_SIZE: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_DATABASE: Final = re.compile(r"/?[0-9]*/?")
_REDIS_OPTION: Final = re.compile(
    "db|username|password|client_name|lib_name|lib_version|socket_keepalive|health_check_interval|retry_on_timeout|ssl_.*"
)
"""Options of a Redis URL: how to reach it and log in.  Others change what its client returns, or its timeouts."""
NAME_BYTES_MAX: Final = 128


def size_bytes(text: str) -> int:
    """Return the bytes of a size as people write it: `1073741824`, `512MiB`, `2GiB`, `2G` (powers of 1024).

    Raises RequestError (`invalid_field`) for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise problem("invalid_field", f"'{text:.40}' is not a size", hint="write bytes, or 512MiB, or 2GiB")
    return int(float(match[1]) * 1024 ** " KMGT".index((match[2] or " ")[0].upper()))


def shown(value: Any) -> str:
    """Return a setting's value for printing, with passwords in URLs masked."""
    # A password may itself contain ':' and '@': it reaches from the first ':' to the last '@'.
    return re.sub(r"(\w+://[^/@:\s]*:)[^/\s]+@", r"\1***@", str(value))


def check(section: str, name: str, value: Any, origin: str) -> None:
    """Raise RequestError (`invalid_field`) for a value that a service's setting `name` cannot have."""
    if wrong := _wrong(section, name, value):
        raise problem("invalid_field", f"{name} (from {origin}): {wrong}")
    if name == "ca" and section != "client":  # psctl has commands that call no cluster
        check_ca(value, origin)


def check_ca(path: str, origin: str) -> None:
    """Raise RequestError (`invalid_field`) for a file without certificates; an empty path is accepted."""
    Credentials.of(None, path, origin=f"ca (from {origin})")


def _wrong(section: str, name: str, value: Any) -> str:
    """Return what is wrong with the value, or ''."""
    match name:
        case "log_level" if value.upper() not in logging.getLevelNamesMapping():
            return f"must be DEBUG, INFO, WARNING or ERROR, not {value!r:.60}"
        case "token" if not is_token(value.strip()):
            return "must be one word of ASCII characters (psctl token prints one)"
        case "revoked" if value:
            return _wrong_token_names(value)
        case "name" if section == "scheduler" and not (value.isprintable() and len(value.encode()) <= NAME_BYTES_MAX):
            return f"must be at most {NAME_BYTES_MAX} bytes of printable text, not {value!r:.60}"
        case "secret" if section in ("scheduler", "shard"):
            return _wrong_secret(value)
        case "port" if not 1 <= value <= 65535:
            return "must be a port from 1 to 65535"
        case "host" if not is_host(value):
            return f"must be an IP address or a host name, not {value!r:.60}"
        case "snapshot_mib_per_s" if not SNAPSHOT_MIB_PER_S[0] <= value <= SNAPSHOT_MIB_PER_S[1]:
            low, high = SNAPSHOT_MIB_PER_S
            return f"must be a number from {low:g} to {high:,.0f}, not {value:g}"
        case "stop_s" if not STOP_S[0] <= value <= STOP_S[1]:
            return f"must be seconds, from {STOP_S[0]:g} to {STOP_S[1]:,.0f}, not {value:g}"
        case "timeout_s" if not 0 < value <= TIMEOUT_S_MAX:
            return f"must be seconds, more than 0 and at most {TIMEOUT_S_MAX:,.0f}, not {value:g}"
        case "memory_limit" if value:
            return _wrong_memory(value)
        case "redis":
            return _wrong_redis(value)
        case "advertise" if value and section == "shard":
            return _wrong_urls(value, ADVERTISED_MAX)
        case "advertise" | "page_url" if value:
            return _wrong_urls(value, 1)
        case "scheduler":
            return _wrong_urls(value)
        case "url":
            return _wrong_urls(",".join(_as_of_node(u.strip()) for u in value.split(",")))
    return ""


def _as_of_node(url: str) -> str:
    """Return a client's URL, which needs no scheme, as a node's."""
    return url if "://" in url or not url else f"http://{url}"


def _wrong_urls(text: str, most: int | None = None) -> str:
    urls = listed_urls(text)
    if not urls:
        return f"must be like http://HOST:PORT, not {text!r:.60}"
    for url in urls:
        if not is_node_url(url) or len(url) > URL_CHARS_MAX:
            return f"must be like http://HOST:PORT, not {shown(url)!r:.200}"
    if most is not None and len(urls) > most:
        return "must be one URL" if most == 1 else f"must be at most {most} URLs"
    return ""


def _wrong_secret(text: str) -> str:
    from paramserver_node import tokens  # services with this setting have it loaded already

    try:
        tokens.keys_of(text)
    except PsError as error:
        return str(error)
    return ""


def _wrong_token_names(text: str) -> str:
    from paramserver_node import tokens  # as above

    names = [name for name in map(str.strip, text.split(",")) if name]
    if not all(map(tokens.is_name, names)):
        return "must be names of tokens (psctl token --name), separated by commas: nothing else is revoked"
    if "node" in names:
        return "must not have 'node', the name of the nodes' own token: no node could call another"
    return ""


def _wrong_memory(text: str) -> str:
    try:
        size = size_bytes(text)
    except PsError as error:
        return str(error)
    if not MEMORY_BYTES_MIN <= size <= MEMORY_BYTES_MAX:
        return f"must be from {MEMORY_BYTES_MIN // MIB}MiB to {MEMORY_BYTES_MAX >> 50}PiB, not {text!r:.60}"
    return ""


def _wrong_redis(text: str) -> str:
    if _is_redis_url(text):
        return _refused_by_client(text) if "?" in text else ""
    # Without a scheme, `shown` cannot tell where the password is.
    masked = shown(text) if "://" in text else text.rpartition("@")[2]
    return f"must be like redis://HOST:6379/0, not {masked!r:.200}"


def _is_redis_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is not a number, or half an IPv6 address
        return False
    if parts.fragment:
        return False
    if parts.scheme == "unix":
        return len(parts.path) > 1 and host is None
    known = parts.scheme in ("redis", "rediss") and (host is None or is_host(unquote(host)))
    return known and port != 0 and bool(_DATABASE.fullmatch(parts.path))


def _refused_by_client(url: str) -> str:
    """Return what is wrong with the options after the '?'; the Redis client is imported only for those."""
    for option, _ in parse_qsl(urlsplit(url).query):
        if not _REDIS_OPTION.fullmatch(option):
            return f"has options that paramserver does not allow: {option!r:.60}"
    from redis.exceptions import RedisError

    from paramserver_node.redis import connect

    try:
        connect(url).connection_pool.make_connection()  # type: ignore[no-untyped-call, unused-ignore]
    except (RedisError, ValueError, TypeError, AttributeError) as error:
        return f"has options that the Redis client rejects: {shown(error)}"
    return ""
