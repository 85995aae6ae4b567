"""The sink of the answer to a pull: the header is decoded, then the body goes straight to its places."""

from paramserver.errors import PsError, problem
from paramserver.wire.frame import PREFIX_BYTES, PullReply, decode_header, header_end
from paramserver.wire.sink import pour


class IncomingPull:
    """The frame that answers a pull, as it arrives; a subclass knows where its body goes.

    `feed` and `end` raise InDoubt for a frame that cannot be read, or whose body is shorter or longer than its places.
    """

    def __init__(self) -> None:
        self.reply: PullReply | None = None
        """The header, once it is complete."""
        self.begin()

    def _places_for(self, reply: PullReply) -> list[memoryview]:
        """Return the memory for the body, in order; no piece is empty.  Raises InDoubt for a wrong reply."""
        raise NotImplementedError

    def begin(self) -> None:
        """Discard an earlier attempt."""
        self.reply = None
        self._head = bytearray()
        self._places: list[memoryview] = []

    def feed(self, data: memoryview) -> None:
        """Take the next bytes."""
        data = data.cast("B") if data.format != "B" else data
        if self.reply is None:
            data = self._feed_head(data)
        if pour(data, self):
            raise problem("in_doubt", "the answer to a pull holds more than was requested")

    def room(self) -> memoryview:
        """Return the memory for the next bytes, up to the end of one place; empty before the body and after it."""
        return self._places[0] if self._places else memoryview(b"")

    def filled(self, size: int) -> None:
        """Note that `size` bytes were put into `room`."""
        self._places[0] = self._places[0][size:]
        if not self._places[0]:
            del self._places[0]

    def end(self) -> None:
        """Check that the answer is complete."""
        if self.reply is None or self._places:
            raise problem("in_doubt", "the answer to a pull ended before it was complete")

    def _feed_head(self, data: memoryview) -> memoryview:
        """Collect the header; return the rest of `data` once it is complete, else nothing."""
        if self._head:
            self._head += data
        head = self._head or data
        try:
            if len(head) < PREFIX_BYTES or len(head) < header_end(head):
                self._head = self._head or bytearray(data)
                return memoryview(b"")
            reply, end = decode_header(head, PullReply)
        except PsError as e:
            raise problem("in_doubt", f"the answer to a pull cannot be read: {e}") from e
        self.reply = reply
        self._places = self._places_for(reply)
        return data[len(data) - (len(head) - end) :]
