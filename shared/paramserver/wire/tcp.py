"""Socket options for connections that carry bodies, at either end."""

import socket
import sys

from paramserver.limits import SEND_BUFFER_BYTES


def prepare(connected: socket.socket) -> None:
    """Set the options of a TCP connection: no Nagle delay, and a small send buffer if both ends have the same address.

    On one machine, a sender that is megabytes ahead of its reader writes into memory that is in neither processor's
    cache.  To another machine the kernel sizes the buffer itself, to what the network path holds.  Unix sockets are
    left alone.
    """
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        here = connected.getpeername()[0] == connected.getsockname()[0]
    except OSError:
        return  # the connection is closed already
    if here:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def unacknowledged_bytes(connected: socket.socket) -> int:
    """Return how much the system still holds of what was sent; 0 if the other end has it all, or where none can tell.

    What it holds is lost if the connection is reset.
    """
    if sys.platform != "linux":
        return 0
    import fcntl
    import termios

    try:
        return int.from_bytes(fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        return 0  # the connection is closed already
