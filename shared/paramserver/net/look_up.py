"""Looks up the address of a host within a time limit."""

import socket
import threading
from concurrent.futures import Future


def look_up(host: str, timeout_s: float) -> None:
    """Look the host up before a blocking connection to it is made, which is then quick to find its address.

    The system's call has no time limit, and takes up to a minute if the name servers are silent: a thread makes it.
    Raises TimeoutError, or what the system's call does.
    """
    found: Future[object] = Future()

    def ask() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, None))
        except Exception as e:
            found.set_exception(e)

    if not host.replace(".", "").isdigit() and ":" not in host:  # it is a name, no address
        threading.Thread(target=ask, name="paramserver look-up", daemon=True).start()
        found.result(timeout_s)
