"""One of the processes that decode frames side by side; ``decoding.py`` starts them and asks them."""

from __future__ import annotations

import json
import mmap
import signal

from hsloader._launch import Parent
from hsloader.benchmark.decoding import decode_in_threads
from hsloader.store.codec import Codec, FrameError
from hsloader.store.fields import Field

__all__ = ["main"]


def main(parent: Parent) -> None:
    """Take what is to be decoded from the first line of the channel, answer each further one with what was done."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with parent.channel.makefile("rwb") as channel:
        asked = json.loads(channel.readline())
        codec = Codec(Field(**asked["field"]), asked["chunk_rows"])
        whole = memoryview(mmap.mmap(parent.fds["frames"], 0, access=mmap.ACCESS_READ))
        frames = [whole[start:stop] for start, stop in zip(asked["edges"], asked["edges"][1:], strict=False)]
        channel.write(b"{}\n")
        channel.flush()
        for line in channel:
            request = json.loads(line)
            try:
                done = decode_in_threads(codec, frames, request["threads"], request["seconds"], first=request["first"])
                answer: dict[str, object] = {"size": done.size, "seconds": done.seconds, "cpu": done.cpu}
            except FrameError as error:
                answer = {"error": str(error)}
            channel.write(json.dumps(answer).encode() + b"\n")
            channel.flush()
