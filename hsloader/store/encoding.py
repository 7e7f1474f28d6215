"""Encodes the chunks of a sample in threads and hands the frames out in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy.typing as npt

from hsloader.store.codec import Codec, Encoder

__all__ = ["ChunkEncoders"]

Bits = npt.NDArray[Any]


class ChunkEncoders:
    """A pool of ``threads`` encoders a codec; with one thread everything happens in the caller's."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; expected at least 1")
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "hsloader-encode") if threads > 1 else None
        self._local = threading.local()

    def encode(self, codec: Codec, chunks: Sequence[Bits]) -> Iterator[memoryview]:
        """The frames of ``chunks`` (bits ``[n, width]`` each) in order; each is valid until the next is asked for."""
        if self._pool is None:
            for chunk in chunks:
                yield self._encoder(codec).encode([chunk])
            return
        waiting: deque[Future[bytes]] = deque()
        try:
            for chunk in chunks:
                waiting.append(self._pool.submit(self._encode, codec, chunk))
                if len(waiting) > 2 * self._threads:
                    yield memoryview(waiting.popleft().result())
            while waiting:
                yield memoryview(waiting.popleft().result())
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _encode(self, codec: Codec, chunk: Bits) -> bytes:
        return bytes(self._encoder(codec).encode([chunk]))

    def _encoder(self, codec: Codec) -> Encoder:
        encoders: dict[Codec, Encoder] = self._local.__dict__.setdefault("encoders", {})
        encoder = encoders.get(codec)
        if encoder is None:
            encoder = encoders[codec] = codec.encoder()
        return encoder
