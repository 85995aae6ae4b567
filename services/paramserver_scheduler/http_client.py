"""The HTTP client with which a scheduler makes requests to the other nodes."""

import httpx

from paramserver.errors import from_document
from paramserver.net.credentials import Credentials

TIMEOUT = httpx.Timeout(30.0, connect=2.0)


def http_client(credentials: Credentials) -> httpx.AsyncClient:
    """Return a client that sends the node's token and trusts its authorities, whatever proxies the environment names.

    The caller closes it.
    """
    return httpx.AsyncClient(
        headers=credentials.headers, verify=credentials.context(), timeout=TIMEOUT, trust_env=False
    )


def check(response: httpx.Response) -> None:
    """Raise the PsError that an unsuccessful response tells of; its body must have been read."""
    if response.is_success:
        return
    try:
        document = response.json()
    except ValueError:
        document = {}
    raise from_document({**(document if isinstance(document, dict) else {}), "status": response.status_code})
