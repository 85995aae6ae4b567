"""Which proxy of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY) a URL is asked of."""

from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment

from paramserver.core.urls import is_loopback


def is_here(url: str) -> bool:
    """Whether the URL is one of this machine."""
    return is_loopback(urlsplit(url).hostname or "")


def proxy_of(url: str) -> SplitResult | None:
    """Return the proxy that the environment sets for this URL; None if there is none, or the URL is of this machine."""
    parts = urlsplit(url)
    proxies = getproxies_environment()
    found = proxies.get(parts.scheme) or proxies.get("all")
    if not found or is_here(url) or _is_excepted(parts, proxies.get("no", "")):
        return None
    return urlsplit(found if "://" in found else f"http://{found}")


def _is_excepted(parts: SplitResult, no_proxy: str) -> bool:
    """Whether NO_PROXY lists a URL's host, alone or with its port, a domain or network that it is in, or `*`."""
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    in_url = f"[{host}]" if ":" in host else host
    spellings = (f".{host}", f".{in_url}", f".{in_url}:{port}")
    try:
        address = ip_address(host)
    except ValueError:
        address = None
    for entry in no_proxy.lower().split(","):
        name = entry.strip().lstrip(".")
        if name == "*" or (name and any(s.endswith(f".{name}") for s in spellings)):
            return True
        with suppress(ValueError):
            if "/" in name and address is not None and address in ip_network(name, strict=False):
                return True
    return False
