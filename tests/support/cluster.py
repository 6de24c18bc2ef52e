"""A Spark standalone cluster on this machine: a master and two workers, as on one host or on two."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pyspark

from tests.support.postgres import free_port

HOME = Path(pyspark.__file__).parent
NOTHING: Mapping[str, str] = MappingProxyType({})


def environment(conf: Path) -> dict[str, str]:
    """The environment in which a process of the cluster, or an application of it, runs."""
    settings = {"LOOKUPCACHE_CONF": str(conf), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return {**os.environ, **settings, "SPARK_HOME": str(HOME), "SPARK_NO_DAEMONIZE": "1"}


class Cluster:
    """A master and two workers of one core, whose executors read a conf file and have environment variables of their own."""

    def __init__(
        self,
        home: Path,
        directories: Sequence[Path],
        settings: Mapping[str, str] = NOTHING,
        variables: Sequence[Mapping[str, str]] = (NOTHING, NOTHING),
    ) -> None:
        self.home = home
        self.directories = list(directories)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        self.master = f"spark://127.0.0.1:{free_port()}"
        self.confs: list[Path] = []
        for number, directory in enumerate(self.directories):
            conf = home / f"lookupcache{number}.conf"
            lines = {"lookup.cache.dir": str(directory), **settings}
            conf.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))
            self.confs.append(conf)
        port = self.master.rsplit(":", 1)[1]
        self._start("master.Master", "--host", "127.0.0.1", "--port", port, "--webui-port", "0", conf=self.confs[0])
        for number, (conf, environment_variables) in enumerate(zip(self.confs, variables, strict=True)):
            place = ["--host", f"127.0.0.{number + 1}", "--webui-port", "0"]  # two hosts to Spark
            size = ["-c", "1", "-m", "1g", "-d", str(home / f"work{number}")]
            self.workers.append(
                self._start("worker.Worker", *place, *size, self.master, conf=conf, variables=environment_variables)
            )

    def _start(
        self, name: str, *arguments: str, conf: Path, variables: Mapping[str, str] = NOTHING
    ) -> subprocess.Popen[bytes]:
        command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
        with (self.home / f"{name}{len(self.processes)}.log").open("wb") as log:
            variables = {**environment(conf), **variables}
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def executor(self, number: int) -> int:
        """The process of a worker's executor. LookupError if there is none at this moment."""
        session = self.workers[number].pid
        for entry in filter(lambda entry: entry.name.isdigit(), Path("/proc").iterdir()):
            with contextlib.suppress(OSError):  # it may end while we look
                in_session = os.getsid(int(entry.name)) == session
                if in_session and b"CoarseGrainedExecutorBackend" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        raise LookupError("no executor")

    def close(self) -> None:
        while self.processes:
            process = self.processes.pop()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
