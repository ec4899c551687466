"""A bare uvloop protocol that writes frames: http_streams.py compares the server with it.

usage: bare_streams.py STREAMS FRAMES BYTES SECONDS

Prints its address. Once STREAMS clients have sent something, it writes FRAMES frames of BYTES bytes
to each, one to all of them every SECONDS.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop


class Stream(asyncio.Protocol):
    streams: list[Any] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._transport not in self.streams:
            self.streams.append(self._transport)


async def main(num_streams: int, num_frames: int, num_bytes: int, pace: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Stream, "127.0.0.1", 0)
    print(f"serving on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", file=sys.stderr)
    while len(Stream.streams) < num_streams:
        await asyncio.sleep(0.01)
    frame = b"data: " + b"x" * (num_bytes - 8) + b"\n\n"
    begin = loop.time()
    for number in range(num_frames - 1):
        for transport in Stream.streams:
            transport.write(frame)
        await asyncio.sleep(max(0.0, begin + (number + 1) * pace - loop.time()))
    for transport in Stream.streams:
        transport.write(b"data: [DONE]\n\n")
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main(*(int(word) for word in sys.argv[1:4]), float(sys.argv[4])))
