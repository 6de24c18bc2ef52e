"""A Redis server on loopback, which can be killed and started again, or be one of a cluster."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from tests.support.postgres import free_port

# The server ends with our side of its standard input: even a test run that is killed leaves none behind.
_GUARD = '"$@" & server=$!; read -r _; kill -KILL "$server"; wait "$server"'


class RedisServer:
    """A server without persistence: a restart has no keys. `url` stays the same. `options`: more of its settings."""

    def __init__(self, *options: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise FileNotFoundError("no Redis server: apt-get install redis-server (scripts/test does)")
        self._directory = Path(tempfile.mkdtemp(prefix="lookupcache-redis-"))
        self.port, self.cluster_port = free_port(), free_port()
        settings = f"--port {self.port} --cluster-port {self.cluster_port} --bind 127.0.0.1 --dir {self._directory} --save --appendonly no"
        self._command = [program, *settings.split(" "), *options]
        self._command.insert(self._command.index("--save") + 1, "")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client: Any = redis.Redis(port=self.port, protocol=2, socket_timeout=30)
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Returns when the server takes connections."""
        log = (self._directory / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                ["sh", "-c", _GUARD, "sh", *self._command], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client.ping()
                return
            except redis.AuthenticationError:
                return
            except redis.RedisError as problem:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"Redis did not start: {(self._directory / 'log').read_text()}") from problem
                time.sleep(0.05)

    def stop(self) -> None:
        """Kill the server. Returns when it is gone."""
        if self._process is not None:
            self._process.stdin.close()  # type: ignore[union-attr]
            self._process.wait(30)
            self._process = None

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        self.client.close()
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def calls(self) -> dict[str, int]:
        """How often each command was carried out so far, but for those of this object."""
        stats = self.client.info("commandstats")
        return {name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in stats.items()}
