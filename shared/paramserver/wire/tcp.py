"""What the socket of a connection that carries bodies is told, at either end."""

import socket

from paramserver.limits import SEND_BUFFER_BYTES


def prepare(connected: socket.socket) -> None:
    """Sets the options of a TCP connection: nothing small waits, and little is unread between ends on one machine.

    A sender that is megabytes ahead of its reader writes into memory that neither processor has in its cache.  To
    another machine the kernel finds the size itself: there it is what the line holds.  A Unix socket is left alone.
    """
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        here = connected.getpeername()[0] == connected.getsockname()[0]
    except OSError:
        return  # it has ended already
    if here:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
