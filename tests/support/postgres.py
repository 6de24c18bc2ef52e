"""A PostgreSQL server on loopback that logs every statement and can be stopped and started again."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

_APPLICATION = "lookupcache-tests"
# The server ends with our side of its standard input: even a test run that is killed leaves none behind. TERM ends one
# that is just starting, and ignores INT so far; with INT a running one does not wait for its clients.
_GUARD = '"$@" & server=$!; read -r _; kill -TERM "$server"; kill -INT "$server"; wait "$server"'
_STATEMENT = re.compile(
    r"^<(.*?)>LOG:  (?:statement|execute [^:]*): (.*(?:\n\t.*)*)(?:\n<.*>DETAIL:  [Pp]arameters: (.*))?$", re.MULTILINE
)


def programs() -> Path:
    """Where `initdb` and `postgres` are: Debian's latest, or beside those on PATH."""
    paths = [*Path("/usr/lib/postgresql").glob("*/bin/postgres"), *map(Path, filter(None, [shutil.which("postgres")]))]
    if not paths:
        raise FileNotFoundError("no PostgreSQL server: apt-get install postgresql (scripts/test does)")
    return max(paths, key=lambda path: [int(part) for part in re.findall(r"\d+", str(path))]).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PostgresServer:
    """A server with a database of its own. `uri` stays the same when it is stopped and started. `logged`: the statements that are logged, as
    PostgreSQL's `log_statement` has it."""

    def __init__(self, logged: str = "all") -> None:
        self._logged = logged
        self._programs = programs()
        # PostgreSQL refuses to run as root, and cannot reach what is below root's private directories.
        self._user: dict[str, Any] = {}
        if os.getuid() == 0:
            self._user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        self._directory = Path(tempfile.mkdtemp(prefix="lookupcache-postgres-"))
        self._log = self._directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.uri = f"postgresql://127.0.0.1:{self.port}/postgres?user=tester"
        try:
            if self._user:
                shutil.chown(self._directory, "postgres", "postgres")
            how = "--username=tester --auth=trust --encoding=UTF8 --locale=C --no-sync"
            self._run("initdb", f"--pgdata={self._directory}/data", *how.split())
            self.start()
        except BaseException:
            self.close()
            raise

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        completed = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, **self._user)
        assert completed.returncode == 0, completed.stdout + completed.stderr

    def start(self) -> None:
        """Returns when the server takes connections; does nothing if it runs."""
        if self._process is not None:
            return
        settings = f"listen_addresses=127.0.0.1 port={self.port} unix_socket_directories= fsync=off log_statement={self._logged} log_line_prefix=<%a>"
        command = [str(self._programs / "postgres"), "-D", str(self._directory / "data")]
        command += [part for setting in settings.split() for part in ("-c", setting)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _GUARD, "sh", *command], cwd="/", stdin=subprocess.PIPE, stdout=log, stderr=log, **self._user
            )  # fmt: skip
        deadline = time.monotonic() + 30
        while True:
            try:
                self.execute("SELECT 1")
                break
            except AssertionError as problem:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL did not start: {self._log.read_text()}") from problem
                time.sleep(0.05)

    def stop(self) -> None:
        """Returns when the server is gone, and every connection with it."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(30)
            self._process = None

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def require_passwords(self, user: str) -> None:
        """From now on, this user needs a password."""
        rules = self._directory / "data" / "pg_hba.conf"
        rules.write_text(
            f"host all {user} 127.0.0.1/32 scram-sha-256\n{rules.read_text(encoding='utf-8')}", encoding="utf-8"
        )
        self.execute("SELECT pg_reload_conf()")

    def execute(self, statement: str) -> None:
        """Run a statement that is not part of what `statements` returns."""
        self._run("psql", f"{self.uri}&application_name={_APPLICATION}", "-Xq", "-c", statement)

    def statements(self, parameters: bool = False) -> list[str]:
        """The statements of others that were executed so far: one entry for each execution, in order. `parameters`: with a comment that has them."""
        statements = _STATEMENT.findall(self._log.read_text(encoding="utf-8"))
        return [
            f"{text} -- {values}" if parameters else text
            for application, text, values in statements
            if application != _APPLICATION
        ]

    def end_connections(self) -> None:
        """Returns when the connections of others are gone."""
        condition = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
        self.execute(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {condition}")
