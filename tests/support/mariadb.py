"""A MariaDB server on loopback that logs every statement and can be stopped and started again. It is no service of the system."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pymysql

from tests.support.postgres import free_port

# The server ends with our side of its standard input, see `postgres.py`.
_GUARD = '"$@" & server=$!; read -r _; kill -KILL "$server"; wait "$server"'
_STATEMENT = re.compile(r"^(?:\d{6} +[\d:]+)?\s+(\d+) (Connect|Query)\s(.*)$")


def program(name: str) -> str:
    place = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")
    if place is None:
        raise FileNotFoundError("no MariaDB server: apt-get install mariadb-server (scripts/test does)")
    return place


class MariadbServer:
    """A server with the database `shop`. `url` stays the same when it is stopped and started."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="lookupcache-mariadb-"))
        self._log = self._directory / "statements"
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._connection_ids = set[str]()  # the numbers of our connections
        self.port = free_port()
        self.url = f"mariadb://127.0.0.1:{self.port}/shop?user=tester"
        self._user = ["--user=mysql"] if os.getuid() == 0 else []
        try:
            if self._user:
                shutil.chown(self._directory, "mysql", "mysql")
            arguments = ["--auth-root-authentication-method=normal", "--skip-test-db", *self._user]
            command = [program("mariadb-install-db"), "--no-defaults", f"--datadir={self._directory}/data", *arguments]
            completed = subprocess.run(command, capture_output=True, text=True, check=False)
            assert completed.returncode == 0, completed.stdout + completed.stderr
            self.start()
            self.execute("CREATE USER tester@'127.0.0.1'")
            self.execute("GRANT ALL ON shop.* TO tester@'127.0.0.1'")
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Returns when the server takes connections; does nothing if it runs."""
        if self._process is not None:
            return
        settings = f"datadir={self._directory}/data socket={self._directory}/s pid-file={self._directory}/pid bind-address=127.0.0.1 port={self.port} general-log=1 general-log-file={self._log} innodb-flush-log-at-trx-commit=2 innodb-buffer-pool-size=32M character-set-server=utf8mb4"
        command = [program("mariadbd"), "--no-defaults", *self._user, *(f"--{text}" for text in settings.split())]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(["sh", "-c", _GUARD, "sh", *command], cwd="/", stdin=subprocess.PIPE, stdout=log, stderr=log)  # fmt: skip
        deadline = time.monotonic() + 60
        while self._connection is None:
            try:
                connection = pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True)
            except pymysql.OperationalError as problem:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log_text = (self._directory / "log").read_text()
                    raise RuntimeError(f"MariaDB did not start: {log_text}") from problem
                time.sleep(0.05)
                continue
            self._connection = connection
            self._connection_ids.add(f"{self._log.stat().st_ino}:{connection.thread_id()}")
        self.execute("CREATE DATABASE IF NOT EXISTS shop")
        self.execute("USE shop")

    def stop(self) -> None:
        """Kills the server. Returns when it is gone, and every connection with it."""
        if self._process is not None:
            if self._connection is not None:
                self._connection._force_close()
                self._connection = None
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)
            self._process = None
            self._log.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def execute(self, statement: str) -> None:
        """Run a statement that is not part of what `statements` returns."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement)

    def end_connections(self) -> None:
        """Returns when the connections of others are gone."""
        while True:
            with self._connection.cursor() as cursor:
                cursor.execute("SELECT id FROM information_schema.processlist WHERE user = 'tester'")
                numbers = [number for (number,) in cursor.fetchall()]
            if not numbers:
                return
            for number in numbers:
                with contextlib.suppress(pymysql.OperationalError):  # it is gone already
                    self.execute(f"KILL HARD CONNECTION {number}")

    def statements(self) -> list[str]:
        """The statements of others that were executed since the server was started: one entry for each execution, in order."""
        statements = list[str]()
        for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines():
            match = _STATEMENT.match(line)
            if match is None or match[2] != "Query":
                continue
            if f"{self._log.stat().st_ino}:{match[1]}" not in self._connection_ids:
                statements.append(match[3])
        return statements
