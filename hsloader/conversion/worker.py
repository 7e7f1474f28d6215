"""A conversion worker: a child process that converts segments one after another, and what the two sides say.

Messages are pickles with a length before them, over the private socket pair of ``hsloader._launch``: a task goes out,
words of progress come back, then the result or the error.
"""

from __future__ import annotations

import pickle
import socket
import struct
import traceback
from typing import Any

from hsloader._launch import Parent
from hsloader.conversion.slots import Slots
from hsloader.conversion.task import SegmentTask, TaskProgress, convert_segment

__all__ = ["ENTRY", "Hangup", "main", "receive", "send"]

ENTRY = "hsloader.conversion.worker:main"

_LENGTH = struct.Struct("<Q")


class Hangup(Exception):  # noqa: N818 - the end of a conversation, not an error
    """The other side closed the connection."""


def send(channel: socket.socket, message: object) -> None:
    """Send one message; ``Hangup`` if the other side is gone."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        channel.sendall(_LENGTH.pack(len(data)) + data)
    except (BrokenPipeError, ConnectionResetError):
        raise Hangup from None


def receive(channel: socket.socket) -> Any:
    """The next message, waiting for it; ``Hangup`` if the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    return pickle.loads(_exactly(channel, length))


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = channel.recv(min(1 << 20, size - len(data)))
        except ConnectionResetError:
            raise Hangup from None
        if not part:
            raise Hangup
        data += part
    return bytes(data)


def main(parent: Parent) -> None:
    """The child's life: task after task until the parent hangs up."""
    parent.leave_with_it()
    slots = Slots()
    while True:
        try:
            task: SegmentTask = receive(parent.channel)
            if parent.gone():  # the task came from a dead process, whose directories others may be cleaning
                return
            send(parent.channel, _answer(parent.channel, task, slots))
        except Hangup:
            return


def _answer(channel: socket.socket, task: SegmentTask, slots: Slots) -> object:
    def report(progress: TaskProgress) -> None:
        send(channel, progress)

    try:
        return convert_segment(task, report, slots)
    except Hangup:
        raise
    except BaseException as error:
        error.add_note("".join(traceback.format_exception(error)))
        try:
            return pickle.loads(pickle.dumps(error))  # whatever does not survive the way is sent as text
        except Exception:
            return RuntimeError(f"{type(error).__name__}: {error}")
