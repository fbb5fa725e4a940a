"""`xpyd operator` as a process of the test, against a real API server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.harness import Cluster, wait_for

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
START_S = 60.0
STOP_S = 15.0


class OperatorProcess:
    """A running operator. `args`: of `xpyd`; the last of one flag counts. `log`: a new file."""

    def __init__(self, args: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        # Any free port: several operators may run on this machine.
        argv = [str(Path(sys.executable).with_name("xpyd")), *args]
        argv += ["--http-host=127.0.0.1", "--http-port=0", "--log-format=text"]
        with log.open("xb") as out:
            self.process = subprocess.Popen(argv, env=dict(environment), stdout=out, stderr=out)
        self.port = 0

    def wait_until_ready(self) -> None:
        """Until all first lists are in."""

        def is_ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the operator ended:\n{self.log()}")
            found = re.findall(r"HTTP on port (\d+)", self.log())
            self.port = int(found[-1]) if found else 0
            return bool(self.port) and self.http("/readyz") == 200

        wait_for(is_ready, START_S, "the operator is ready", explain=self.log)

    def log(self) -> str:
        return self._log.read_text()

    def http(self, path: str) -> int:
        """The status that the path answers with."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as got:
                return got.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Every sample by name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as got:
            text = got.read().decode()
        return {
            (name, tuple(sorted(_LABEL.findall(labels)))): float(value)
            for name, labels, value in _SAMPLE.findall(text)
        }

    def calls(self) -> Counter[str]:
        """API calls by verb; watches and lists are kopf's."""
        found: Counter[str] = Counter()
        for (name, labels), value in self.metrics().items():
            if name == "xpyd_operator_api_calls_total":
                found[dict(labels)["verb"]] += int(value)
        return found

    def writes(self) -> int:
        """Calls that could change something."""
        reads = {"get", "list", "watch"}
        return sum(count for verb, count in self.calls().items() if verb not in reads)

    def turns(self) -> int:
        """Turns that ended, well or not."""
        return int(
            sum(
                value
                for (name, _), value in self.metrics().items()
                if name == "xpyd_operator_reconciles_total"
            )
        )

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """At once, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def running_operator(
    cluster: Cluster, *namespaces: str, flags: Sequence[str] = ()
) -> Iterator[OperatorProcess]:
    """An operator of these namespaces, none: of all; it is ready, and is gone afterwards."""
    places = (f"--namespace={name}" for name in namespaces)
    with ready_operator(["operator", *flags, *places], cluster.client_environment()) as operator:
        yield operator


@contextmanager
def ready_operator(
    args: Sequence[str], environment: Mapping[str, str]
) -> Iterator[OperatorProcess]:
    """An operator with these arguments and this environment."""
    with tempfile.TemporaryDirectory() as folder:
        operator = OperatorProcess(args, environment, Path(folder) / "operator.log")
        try:
            operator.wait_until_ready()
            yield operator
        finally:
            operator.kill()
