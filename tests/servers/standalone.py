"""A Spark standalone cluster on this machine: a master, and workers of one core with folders of their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyspark

from dagster_unified.engine.launch import without_zips
from tests.ports import free_port

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"


class Cluster:
    """`environment` is what its processes, and a driver, have in addition."""

    def __init__(self, folder, environment=None, workers=2):
        self.folder = folder
        self.port = free_port()
        self.url = f"spark://127.0.0.1:{self.port}"
        with without_zips("local", {}):  # executors import pyspark from this environment too
            inherited = dict(os.environ)
        self.environment = {
            **inherited,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            # a job waits until it has both workers, so that whoever looks sees both at work
            "JDK_JAVA_OPTIONS": (
                f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -Dspark.cores.max={workers}"
                " -Dspark.scheduler.minRegisteredResourcesRatio=1"
            ),
            "SPARK_MASTER_OPTS": (
                f"-Dspark.deploy.recoveryMode=FILESYSTEM -Dspark.deploy.recoveryDirectory={folder}/recovery"
            ),
            **(environment or {}),
        }
        self.processes = []
        self.start_master()
        self.workers = []
        for _ in range(workers):
            self.start_worker()

    def start(self, role, *arguments):
        with (self.folder / f"{role}.log").open("ab") as log:
            command = [
                str(SPARK_CLASS),
                f"org.apache.spark.deploy.{role}",
                "--host",
                "127.0.0.1",
                "--webui-port",
                "0",
                *arguments,
            ]
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)

    def start_master(self):
        """Start the master, also after it was killed: it remembers its workers and applications."""
        self.master = self.start("master.Master", "--port", str(self.port))
        self.processes.append(self.master)
        self.until(self.listening, "the master listens")

    def start_worker(self):
        """A worker of one core with a folder of its own, also in the place of one that was killed."""
        folder = self.folder / f"work{len(self.processes)}"
        self.workers.append(self.start("worker.Worker", "-c", "1", "-m", "1g", "-d", str(folder), self.url))
        self.processes.append(self.workers[-1])

    def executor(self, worker):
        """The process of the executor that a worker has started; None where it has none now."""
        for child in Path(f"/proc/{worker.pid}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):  # of a process that ends just now
                for pid in child.read_text().split():
                    if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return int(pid)
        return None

    def listening(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def until(self, look, what):
        end = time.monotonic() + 600
        while not look():
            assert time.monotonic() < end, f"not within 600 s: {what}"
            time.sleep(0.1)

    def kill(self, worker):
        """The worker and the executor that it started, which are one process group."""
        os.killpg(worker.pid, signal.SIGKILL)

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                self.kill(process)
                process.wait()
