"""A schema registry for tests: Apicurio Registry, with the interface of Confluent's, in memory.

`make .venv/registry/ready` fetches it from Maven Central. It listens on a free port of the loopback interface.
"""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.ports import free_port
from tests.servers.kafka import START_SECONDS, dies_with_us

JARS = Path(sys.prefix) / "registry"


class Registry:
    """One registry, whose schemas are gone when it ends."""

    def __init__(self, folder: Path) -> None:
        self._log, self._port = folder / "registry.log", free_port()
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/apis/ccompat/v7"

    def start(self) -> "Registry":
        if not (JARS / "ready").exists():
            raise RuntimeError(f"the registry is not in {JARS}: run make .venv/registry/ready")
        (jar,) = JARS.glob("*-runner.jar")
        command = [
            "java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
            "-Dquarkus.http.host=127.0.0.1", f"-Dquarkus.http.port={self._port}", "-jar", str(jar),
        ]  # fmt: skip
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*dies_with_us(), *command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the registry did not start:\n{self._log.read_text()[-5000:]}")
            time.sleep(0.1)
        return self

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        with suppress(URLError, OSError), urlopen(f"{self.url}/subjects", timeout=5) as answer:
            return answer.status == 200
        return False
