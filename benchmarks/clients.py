"""How much memory the page takes while many people use it at once.

    .venv/bin/python benchmarks/clients.py [--clients 50] [--seconds 3600]

The server runs in a process of its own, as `gpipe dashboard` starts it. Each client turns a knob, waits for what the
page then asks for (the verdict, the charts, what to change next; now and then the space around the plan), and turns
the next: plans of shipped scenarios with knobs drawn by chance, one in twenty of them of 256 stages by 4096
micro-batches, which is large. Prints the server's memory as time goes on, its highest point, and how many requests
were answered, with which status; ends with status 1 if that point is beyond what the documentation states.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from gpipe_sim.scenario.reading import shipped_scenarios

LIMIT_MIB = 2048
"""What the documentation states for 50 clients."""
LARGE = "?scenario=bubble&set=batch=4096&set=plan.microbatches=4096&set=plan.stages=256&set=" + (
    "model=%7Bkind%3A+layers%2C+layers%3A+%5B%7Bname%3A+layer%2C+repeat%3A+256%2C+forward%3A+1+ms%7D%5D%7D"
)


def query(luck: random.Random) -> str:
    """The address of a plan."""
    if luck.random() < 0.05:
        return f"{LARGE}&set=cluster.link.latency={luck.randrange(1, 1000)}+us"
    name = luck.choice(sorted(path.stem for path in shipped_scenarios().glob("*.yaml")))
    return (
        f"?scenario={name}&set=plan.microbatches={luck.randrange(1, 129)}&set=plan.stages={luck.choice([1, 2, 4, 8])}"
    )


class Client(threading.Thread):
    """Somebody at the page."""

    def __init__(self, address: str, callbacks: list[dict[str, Any]], seed: int, until: float) -> None:
        super().__init__(daemon=True)
        self._address, self._until, self._luck = address, until, random.Random(seed)
        self._callbacks = {name: find(callbacks, name) for name in ("about.", "memory.figure", "moves.", "heatmap.")}
        self._token = f"client-{seed}"
        self.statuses: Counter[int] = Counter()

    def run(self) -> None:
        """Until the time is over."""
        while time.monotonic() < self._until:
            now = query(self._luck)
            given = {"history.data": [now], "drawn.data": now, "query-space.data": now, "token.data": self._token}
            given["metric.value"] = "step time"
            for name, callback in self._callbacks.items():
                if name != "heatmap." or self._luck.random() < 0.1:
                    self._ask(callback, given)

    def _ask(self, callback: dict[str, Any], given: dict[str, Any]) -> None:
        parts = {
            part: [{**one, "value": given.get(f"{one['id']}.{one['property']}")} for one in callback[part]]
            for part in ("inputs", "state")
        }
        first = callback["inputs"][0]
        outputs = [dict(zip(("id", "property"), one.rsplit(".", 1), strict=True)) for one in _outputs(callback)]
        body = {"output": callback["output"], "outputs": outputs}
        body["changedPropIds"] = [f"{first['id']}.{first['property']}"]
        request = urllib.request.Request(
            f"{self._address}_dash-update-component",
            json.dumps(body | parts).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                answer.read()
                self.statuses[answer.status] += 1
        except urllib.error.HTTPError as error:
            self.statuses[error.code] += 1
        except OSError:
            self.statuses[0] += 1


def _outputs(callback: dict[str, Any]) -> list[str]:
    """Of a callback with several: ``..a.value...b.value..``"""
    found: list[str] = callback["output"].removeprefix("..").removesuffix("..").split("...")
    return found


def find(callbacks: list[dict[str, Any]], output: str) -> dict[str, Any]:
    """The callback whose first output begins so."""
    return next(one for one in callbacks if one["output"].lstrip(".").startswith(output))


def memory_mib(pid: int, what: str) -> float:
    """VmRSS: now; VmHWM: at the highest point so far."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def main() -> None:
    """Start the server and its clients, and look at its memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=3600)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gpipe_sim.cli", "dashboard", "--port", "0", "--runs", folder]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            found = re.search(r"http://\S+/", server.stderr.readline())
            assert found is not None, "the server says where it is"
            threading.Thread(target=lambda: [print(line, end="") for line in server.stderr or ()], daemon=True).start()
            with urllib.request.urlopen(f"{found[0]}_dash-dependencies") as answer:
                callbacks = [one for one in json.load(answer) if not one["clientside_function"]]
            began, until = time.monotonic(), time.monotonic() + arguments.seconds
            print(f"{memory_mib(server.pid, 'VmRSS'):.0f} MiB before anybody came", flush=True)
            clients = [Client(found[0], callbacks, seed, until) for seed in range(arguments.clients)]
            for client in clients:
                client.start()
            while (now := time.monotonic()) < until:
                time.sleep(min(arguments.seconds / 10, max(0.0, until - now)))
                highest = memory_mib(server.pid, "VmHWM")
                print(f"{time.monotonic() - began:.0f} s: {memory_mib(server.pid, 'VmRSS'):.0f} MiB", flush=True)
            statuses = sum((client.statuses for client in clients), Counter())
        finally:
            server.kill()
            server.wait()
    print(f"{arguments.clients} clients, {statuses.total()} requests {dict(statuses)}: {highest:.0f} MiB at the most")
    sys.exit(highest > LIMIT_MIB)


if __name__ == "__main__":
    main()
