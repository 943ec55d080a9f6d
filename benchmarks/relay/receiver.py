"""A webhook receiver that costs little, in a process of its own: TLS, kept connections, answers 204, keeps what came.

Started with the folder of its certificate, it prints its port, serves until standard input closes, and then writes
a line for every request: webhook-id, ce-partitionkey and body, separated by tabs.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path

ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"
LIMIT = 2**16


async def main(folder: Path) -> None:
    """Serve."""
    kept: list[tuple[str, str, str]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                fields = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
                }
                body = await reader.readexactly(int(fields["content-length"]))
                kept.append((fields["webhook-id"], fields["ce-partitionkey"], body.decode()))
                writer.write(ANSWER)
        except asyncio.IncompleteReadError:  # the other side is done
            writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert", folder / "key")
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context, limit=LIMIT, backlog=100)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    lines = ("\t".join(delivery) + "\n" for delivery in kept)
    await asyncio.to_thread((folder / "kept").write_text, "".join(lines))
    server.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
