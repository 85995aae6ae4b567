"""Which proxy of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY) a URL is asked of."""

from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment


def is_here(url: str) -> bool:
    """Whether the URL is one of this machine."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def proxy_of(url: str) -> SplitResult | None:
    """Return the proxy that the environment sets for this URL; None if there is none, or the URL is of this machine."""
    parts = urlsplit(url)
    host, proxies = parts.hostname or "", getproxies_environment()
    found = proxies.get(parts.scheme) or proxies.get("all")
    if not found or is_here(url) or _is_excepted(host, proxies.get("no", "")):
        return None
    return urlsplit(found if "://" in found else f"http://{found}")


def _is_excepted(host: str, no_proxy: str) -> bool:
    """Whether NO_PROXY lists this host, a domain that it is in, a network that has its address, or `*`."""
    try:
        address = ip_address(host)
    except ValueError:
        address = None
    for entry in no_proxy.lower().split(","):
        name = entry.strip().lstrip(".")
        if name == "*" or (name and f".{host}".endswith(f".{name}")):
            return True
        with suppress(ValueError):
            if "/" in name and address is not None and address in ip_network(name, strict=False):
                return True
    return False
