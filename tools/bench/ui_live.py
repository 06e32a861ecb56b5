"""How long a new point of a run takes until a reader of its page has it, and what a refresh sends.

A program reports steps with nine curves to a log with the usual settings. A reader follows the page of the run as the
browser's script does: it waits for an event, then asks for the parts that have changed. The time is from the report
of a step to the end of the response that has it; steps are reported at random times. The repository is a local
folder, and a bucket of moto's S3 server on this machine. Drawing in the browser comes on top.

    python tools/bench/ui_live.py [--points 20] [--steps 4000] [--only local|s3] [--json]
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from report import Report, make_parser
from ui_server import UiServer, running_server

from datasvc.repository import Repository
from datasvc.runs import RunLog

_MOTO = Path(__file__).parents[2] / "tests" / "moto_process.py"
_CURVES = ("loss", "rate", "images_per_s", "grad_norm", "scale", "momentum", "entropy", "accuracy", "gap")
_MAX_WAIT_S = 60.0


class Reader:
    """Follows the page of a run, and notes when it has which step."""

    def __init__(self, server: UiServer, run: str) -> None:
        self._server = server
        self._run = run
        self._digests: dict[str, str] = {}
        self._seen = threading.Condition()
        self._step = -1
        self.refresh_bytes: list[tuple[float, float]] = []
        threading.Thread(target=self._follow, daemon=True).start()

    def wait_for(self, step: int) -> float:
        """Return when the page has had a step, by `time.perf_counter`."""
        with self._seen:
            if not self._seen.wait_for(lambda: self._step >= step, _MAX_WAIT_S):
                raise SystemExit(f"step {step} has not come within {_MAX_WAIT_S:g} s; the page has step {self._step}")
            return self._seen_s

    def _follow(self) -> None:
        with urllib.request.urlopen(f"{self._server.address}/api/runs/{self._run}/events") as events:  # noqa: S310
            for line in events:
                if line.startswith(b"data:"):
                    self._refresh()

    def _refresh(self) -> None:
        present = " ".join(f"{name}={digest}" for name, digest in self._digests.items())
        request = urllib.request.Request(  # noqa: S310
            f"{self._server.address}/api/parts/runs/{self._run}",
            headers={"Datasvc-Parts": present, "Accept-Encoding": "gzip"},
        )
        with urllib.request.urlopen(request) as response:  # noqa: S310
            body = response.read()
        content = gzip.decompress(body)
        answer = json.loads(content)
        # The tables of numbers are in elements that are closed at first: the script does not ask for them.
        names = [name for name in answer["ids"] if not name.endswith("-numbers")]
        self._digests = {name: self._digests.get(name, "") for name in names}
        self._digests |= {name: part["digest"] for name, part in answer["parts"].items()}
        chart = answer["parts"].get("chart-0")
        if chart is None:
            if names and not present:
                self._refresh()  # the first answer has the names of the parts
            return
        with self._seen:
            self.refresh_bytes.append((float(len(content)), float(len(body))))
            self._step, self._seen_s = json.loads(chart["series"])["x"][-1], time.perf_counter()
            self._seen.notify_all()


@contextmanager
def moto_bucket() -> Iterator[str]:
    """Serve an empty bucket; yield its URL. The environment of this process gets what clients need."""
    import boto3

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, _MOTO, "127.0.0.1"], **pipes, text=True) as moto:
        assert moto.stdout is not None
        address = f"http://127.0.0.1:{int(moto.stdout.readline())}"
        os.environ |= {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "TESTKEY",
            "AWS_SECRET_ACCESS_KEY": "SECRET",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        boto3.client("s3").create_bucket(Bucket="bench")
        try:
            yield "s3://bench/repository"
        finally:
            moto.communicate()


def measure(url: str, home: Path, num_steps: int, num_points: int) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the seconds of each point, and the bytes of each refresh but the first, before and after compression."""
    chance = random.Random(0)  # noqa: S311 - no secret
    repository = Repository.create(url)
    times_s = []

    def report(step: int) -> None:
        times = {"step_s": 0.1, "wait_s": 0.01, "forward_s": 0.03, "backward_s": 0.04, "update_s": 0.01}
        log.report("step", step=step, **{name: chance.random() for name in _CURVES}, **times)

    with RunLog.open(repository, "live") as log, running_server(url, home) as server:
        for step in range(num_steps):
            report(step)
        if not log.flush():
            raise SystemExit(f"the log cannot be written to {url}")
        reader = Reader(server, log.ref)
        reader.wait_for(num_steps - 1)
        for step in range(num_steps, num_steps + num_points):
            time.sleep(chance.uniform(0.5, 2.5))  # at any moment between two parts of the log
            began_s = time.perf_counter()
            report(step)
            times_s.append(reader.wait_for(step) - began_s)
    return times_s, reader.refresh_bytes[1:]


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--points", type=int, default=20, help="points whose time is measured")
    parser.add_argument("--steps", type=int, default=4000, help="of the run before")
    parser.add_argument("--only", choices=["local", "s3"])
    arguments = parser.parse_args()
    report = Report(f"A new point of a live run with {arguments.steps:,} steps and {len(_CURVES)} curves")
    with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as folder:
        for store in ("local", "s3") if arguments.only is None else (arguments.only,):
            if store == "local":
                times_s, sizes = measure(f"{folder}/repository", Path(folder), arguments.steps, arguments.points)
            else:
                with moto_bucket() as url:
                    times_s, sizes = measure(url, Path(folder), arguments.steps, arguments.points)
            report.add_row(f"{store}: report until the page has the point", "s", times_s)
            report.add_row(f"{store}: a refresh", "kB", [size / 1e3 for size, _ in sizes])
            report.add_row(f"{store}: a refresh, compressed", "kB", [size / 1e3 for _, size in sizes])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
