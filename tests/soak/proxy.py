"""A proxy before the store that delays, refuses, truncates and cuts off, as often as it is told.

Run as `python -m tests.soak.proxy <JSON: store, seed, faults>`; says its address in its first line. `POST /-/faults`
with a JSON object changes how often (probabilities by name), `GET /-/counts` answers what was done so far.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
import socket
import struct
import sys
import urllib.request
from typing import Any

FAULTS = {"delayed": 0.05, "refused": 0.02, "lost": 0.01, "unanswered": 0.01, "truncated": 0.01}
"""How often, of all requests: answered up to `DELAY_S` later; by 503; cut off before the store has it; cut off once the store has
done it; cut off in the midst of the answer."""
STORM = {"refused": 0.4, "lost": 0.1}
DELAY_S = 0.5
_REFUSAL = b"<?xml version='1.0'?><Error><Code>ServiceUnavailable</Code><Message>injected</Message></Error>"


class CutOffError(Exception):
    """This connection is to be reset."""


class Proxy:
    """Requests are counted by what was done to them; `whole` are those to which nothing was."""

    def __init__(self, store: str, seed: int, faults: dict[str, float]) -> None:
        self._host, port = store.removeprefix("http://").split(":")
        self._port = int(port)
        self._rng = random.Random(seed)
        self._faults = dict(faults)
        self.counts = collections.Counter[str]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        try:
            while True:
                await self._answer(reader, writer)
                await writer.drain()
        except CutOffError:
            # A reset, not an orderly end.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        request, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = [line.split(":", 1) for line in lines]
        values = {name.lower(): value.strip() for name, value in headers}
        if values.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(values.get("content-length", 0)))
        if request.split(" ")[1].startswith("/-/"):
            writer.write(_response("200 OK", json.dumps(self._told(request, body)).encode()))
            return
        fault = self._fault()
        self.counts[fault or "whole"] += 1
        if fault == "delayed":
            await asyncio.sleep(self._rng.uniform(0, DELAY_S))
        if fault == "refused":
            writer.write(_response("503 Service Unavailable", _REFUSAL if not request.startswith("HEAD") else b""))
            return
        if fault == "lost":
            raise CutOffError
        kept = [f"{name}:{value}" for name, value in headers if name.lower() not in ("connection", "expect")]
        sent = "\r\n".join([request, *kept, "Connection: close", "", ""]).encode("latin-1") + body
        answer_head, answer = await self._ask(sent)
        if fault == "unanswered":
            raise CutOffError
        if fault == "truncated":
            writer.write(answer_head + answer[: len(answer) // 2])
            await writer.drain()
            raise CutOffError
        writer.write(answer_head + answer)

    def _told(self, request: str, body: bytes) -> Any:
        if "/-/faults" in request:
            self._faults.update(json.loads(body))
        return self.counts

    def _fault(self) -> str | None:
        drawn = self._rng.random()
        for name, share in self._faults.items():
            drawn -= share
            if drawn < 0:
                return name
        return None

    async def _ask(self, sent: bytes) -> tuple[bytes, bytes]:
        """The store's answer: its head, made fit for a connection that stays, and its body."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(sent)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        kept = [line for line in lines[1:] if line.split(":", 1)[0].lower() not in ("connection", "transfer-encoding")]
        if not any(line.lower().startswith("content-length:") for line in kept):
            kept.append(f"Content-Length: {len(body)}")
        status = lines[0].replace("HTTP/1.0", "HTTP/1.1")
        return "\r\n".join([status, *kept, "", ""]).encode("latin-1"), body


def _response(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def set_faults(proxy: str, faults: dict[str, float]) -> None:
    """Have a proxy do these so often from now on."""
    asked = urllib.request.Request(f"{proxy}/-/faults", json.dumps(faults).encode(), method="POST")
    urllib.request.urlopen(asked, timeout=30).close()


def counts(proxy: str) -> dict[str, int]:
    """How many requests a proxy has treated how."""
    with urllib.request.urlopen(f"{proxy}/-/counts", timeout=30) as answer:
        found: dict[str, int] = json.load(answer)
    return found


async def main() -> None:
    given = json.loads(sys.argv[1])
    proxy = Proxy(given["store"], given["seed"], given.get("faults", FAULTS))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
