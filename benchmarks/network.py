"""How right are predictions over real networks? Hosts of network namespaces, links with a rate, torchrun between them.

    sudo python benchmarks/network.py            Linux, two cores, about twelve minutes with nothing else running
    sudo python benchmarks/network.py --quick    a few points, to see that it works

Every rate is probed by the profiler's own code, which gives the plan's network; the plan predicts; the commands that
`gpipe run --nodes` prints are started, one on each host; and measured is compared with predicted. Rehearsed layers take
their time asleep (two cores would be too few for four hosts that compute), but their messages are whole and pass the
link that is there. CPU pipelines compute, on a core for each host.

The knee is where the link becomes the bottleneck: over seconds per bit the step time is two straight lines, and the
knee is where they cross, found in the same way in what was predicted and what was measured.

What this cannot show: real cards, drivers and switches. Copying costs cores: at 10 Gbit it is they that set the pace.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hosts import INTERFACE, Hosts, what_is_missing
from rows import Outcome, add_option, of_errors, save

from gpipe_exec.devices.environment import worker_environment
from gpipe_exec.measure.profiler import measure_profile
from gpipe_exec.run.launch import Settings, commands_for_machines, prepare
from gpipe_sim.base.files import Document
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.runs.compare import Comparison, compare_run
from gpipe_sim.runs.directory import load_run
from gpipe_sim.scenario.catalog import Link
from gpipe_sim.scenario.mesh import MESSAGES_INSIDE
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.scenario.schema import Scenario

GOAL, KNEE_GOAL = 0.03, 0.05
NUM_MICROBATCHES = 8
ACTION_S = 40e-3
"""Of every rehearsed forward and backward: long beside the wake-ups of two busy cores."""
MB, MBIT = 1e6, 1e6
TRANSFORMER = {"kind": "transformer", "layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "sequence": 128}
TRANSFORMER_SAMPLES = 32
"""In eight micro-batches of four: messages of half a megabyte."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run."""

    what: str
    """Which question it belongs to: grid, knee, hosts, shared, cpu, replicas, copies."""
    rate: float
    """Bits per second of every cable."""
    message_bytes: float = 4 * MB
    overlap: bool = True
    stages: int = 2
    hosts: int = 2
    placement: tuple[int, ...] | None = None
    replicas: int = 1
    weight_bytes: float = 0.0
    """Of each rehearsed layer, which are what replicas sum: as many bytes."""

    @property
    def device(self) -> str:
        return "cpu" if self.what in ("cpu", "copies") else "rehearse"

    @property
    def per_host(self) -> int:
        """Ranks of all replicas."""
        return self.stages * self.replicas // self.hosts


@dataclass(frozen=True, kw_only=True)
class Result(Outcome):
    """How one run compared with its prediction."""

    point: Point
    attribution: dict[str, float]
    """Shares of the error, of the measured step."""


def points(*, quick: bool) -> list[Point]:
    """The grid, the rates around a knee, more hosts, two ranks behind one NIC, and pipelines that compute."""
    if quick:
        return [Point(what="grid", rate=300 * MBIT, overlap=overlap, message_bytes=MB) for overlap in (True, False)] + [
            _shared(1000 * MBIT, overlap=True)
        ]
    grid = [
        Point(what="grid", rate=rate * MBIT, message_bytes=size * MB, overlap=overlap)
        for rate in (100, 300, 1000, 3000, 10000)
        for size in (1, 4)
        for overlap in (True, False)
    ]
    knee = [Point(what="knee", rate=rate * MBIT) for rate in (450, 550, 650, 750, 850, 1000, 1250, 1600, 2500)]
    more = [Point(what="hosts", rate=rate * MBIT, stages=n, hosts=n) for rate in (300, 1000) for n in (3, 4)]
    shared = [_shared(rate * MBIT, overlap=overlap) for rate in (300, 1000) for overlap in (True, False)]
    cpu = [
        Point(what="cpu", rate=rate * MBIT, overlap=overlap) for rate in (100, 300, 1000) for overlap in (True, False)
    ]
    return [*grid, *knee, *more, *shared, *cpu, *_replicated()]


def _replicated() -> list[Point]:
    """Copies of a pipeline that sum 16 MB for each stage: a host for each rank, or for all ranks of a copy, whose sums
    then share its cable; and copies that compute."""
    found = []
    for rate in (1000 * MBIT, 10000 * MBIT):
        for D, K, hosts in ((2, 1, 2), (4, 1, 4), (2, 2, 4), (2, 2, 2), (4, 2, 4)):
            sizes = {"message_bytes": 0.1 * MB, "weight_bytes": 16 * MB}
            found.append(Point(what="replicas", rate=rate, replicas=D, stages=K, hosts=hosts, **sizes))
        found.append(Point(what="copies", rate=rate, replicas=2, stages=1))
    return found


def _shared(rate: float, *, overlap: bool) -> Point:
    """Every edge crosses, and each host's two ranks send through its one cable."""
    return Point(what="shared", rate=rate, stages=4, overlap=overlap, placement=(0, 2, 1, 3))


def scenario_of(point: Point, network: Link, profile: Path | None = None) -> Scenario:
    """What a person would write for these hosts, with the network as it was probed."""
    layer = {
        "name": "rehearsed",
        "repeat": point.stages,
        "forward": f"{ACTION_S!r} s",
        "backward": f"{ACTION_S!r} s",
        "output": f"{point.message_bytes!r} B",
        "parameters": f"{point.weight_bytes!r} B",
    }
    is_cpu = point.device == "cpu"
    probed = {"bandwidth": f"{float(network.bandwidth)!r} B/s", "latency": f"{float(network.latency)!r} s"}
    data: dict[str, Any] = {
        "name": point.what,
        "model": TRANSFORMER if is_cpu else {"kind": "layers", "layers": [layer]},
        "batch": point.replicas * (TRANSFORMER_SAMPLES if is_cpu else NUM_MICROBATCHES),
        "dtype": "fp32",
        "cluster": {
            "device": "cpu",
            "nodes": point.hosts,
            "devices_per_node": point.per_host,
            "link": probed,
            "network": probed,
            "overlap": point.overlap,
        },
        "plan": {
            "stages": point.stages,
            "microbatches": NUM_MICROBATCHES,
            "checkpoint": "never",
            "replicas": point.replicas,
            # What shares a host: the ranks of a copy.
            "order": list(MESSAGES_INSIDE),
            **({"placement": list(point.placement)} if point.placement else {}),
        },
    }
    if profile is not None:
        data["profile"] = str(profile)
    (scenario,) = parse_scenario(Document("network", data))
    return scenario


# --- the knee --------------------------------------------------------------------------------------------------------


def find_knee(rates: Sequence[float], seconds: Sequence[float]) -> float:
    """The rate at which two straight lines over 1 / rate cross: those that fit best, of two points each at least.

    seconds |            x
            |        x              left of the knee messages hide behind compute but for the first and the last,
            | x  x x                right of it every one is waited for
            +---------^-------- 1 / rate
    """
    order = np.argsort(rates)[::-1]
    x, y = 1 / np.array(rates, dtype=float)[order], np.array(seconds, dtype=float)[order]
    if len(x) < 4:
        raise ValueError(f"found {len(x)} rates, expected at least 4 to find a knee")
    best, knee = float("inf"), float("nan")
    for cut in range(2, len(x) - 1):
        lines = [np.polyfit(x[:cut], y[:cut], 1), np.polyfit(x[cut:], y[cut:], 1)]
        (slope, base), (steep, below) = lines
        fitted = np.concatenate([np.polyval(lines[0], x[:cut]), np.polyval(lines[1], x[cut:])])
        squares = float(((fitted - y) ** 2).sum())
        if squares < best and steep > slope:
            best, knee = squares, float((steep - slope) / (base - below))
    return knee


# --- running ---------------------------------------------------------------------------------------------------------


class Runner:
    """Starts torchrun on hosts, as a person would on each of several machines."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._num_runs = 0

    def probe(self, largest_bytes: float) -> Link:
        """The link between two hosts, by the profiler's own code."""
        out = self._folder / "link.json"
        arguments = f"-m gpipe_exec.probe --largest '{largest_bytes:.0f} B' --out {out}"
        self._start([self._torchrun(node, 2, arguments) for node in range(2)], os.environ)
        return Link(name="measured", **json.loads(out.read_text()))

    def run(self, point: Point, plan: Plan, steps: int) -> Comparison:
        """Execute a plan by the commands that `gpipe run --nodes` prints."""
        run = self._folder / f"run{self._num_runs}"
        is_cpu = point.device == "cpu"
        settings = Settings(
            device=point.device,
            steps=steps,
            warmup=1,
            timeout=60,
            links="plan" if is_cpu else "real",
            reprofile=is_cpu,
            endpoint=self._endpoint(),
        )
        run.mkdir()
        prepare(plan, run, settings)
        commands = commands_for_machines(plan, run, settings, point.hosts)
        self._start(commands, worker_environment(plan.scenario), pinned=is_cpu)
        return compare_run(*load_run(run))

    def _torchrun(self, node: int, num_nodes: int, arguments: str) -> str:
        where = f"--nnodes {num_nodes} --node-rank {node} --rdzv-backend static --rdzv-endpoint {self._endpoint()}"
        return f"OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 1 {where} {arguments}"

    def _endpoint(self) -> str:
        """A port of its own for each run: nobody has to wait until the last one's is free again."""
        return f"{self._hosts.all[0].address}:{20000 + self._num_runs}"

    def _start(self, commands: Sequence[str], environment: Mapping[str, str], *, pinned: bool = False) -> None:
        """One command on each host, on a core of its own if it computes; returns when all have ended well."""
        self._num_runs += 1
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        project = f"{Path(__file__).parents[1]}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        settings = {**environment, "PATH": path, "PYTHONPATH": project, "GLOO_SOCKET_IFNAME": INTERFACE}
        cores = sorted(os.sched_getaffinity(0))
        logs = [self._folder / f"host{node}.log" for node in range(len(commands))]
        started = []
        for node, (command, log) in enumerate(zip(commands, logs, strict=True)):
            with open(log, "wb") as output:
                on = ["taskset", "--cpu-list", str(cores[node % len(cores)])] if pinned else []
                started.append(self._hosts.start(node, [*on, "bash", "-c", command], settings, output))
        deadline = time.monotonic() + 300
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started) or time.monotonic() > deadline:
                time.sleep(2)  # for the others to say why
                break
            time.sleep(0.05)
        if any(process.poll() != 0 for process in started):
            told = "\n".join(f"host {node}:\n{log.read_text()[-3000:]}" for node, log in enumerate(logs))
            raise RuntimeError(f"a run across the hosts failed\n{told}")


def result_of(point: Point, comparison: Comparison) -> Result:
    return Result(
        point=point,
        predicted_s=comparison.prediction.step_time_s,
        measured_s=comparison.step_time_s,
        spread=comparison.measured_cv,
        attribution={name: share / comparison.step_time_s for name, share in comparison.attribution_s.items()},
    )


# --- reporting -------------------------------------------------------------------------------------------------------


def show(result: Result) -> None:
    p = result.point
    copies = f"D={p.replicas} " if p.replicas > 1 else ""
    what = f"{p.what:6} {copies}K={p.stages} on {p.hosts} hosts {p.rate / MBIT:6.0f} Mbit/s "
    what += f"{max(p.message_bytes, p.weight_bytes) / MB:.0f} MB" if p.device == "rehearse" else "0.5 MB computed"
    mode = "overlapped" if p.overlap else "blocking"
    print(
        f"{what} {mode:10} {result.predicted_s * 1e3:7.0f} {result.measured_s * 1e3:7.0f} ms {result.error:+6.1%} "
        f"(spread {result.spread:.1%})",
        flush=True,
    )


TITLES = {
    "grid": "two hosts, rates by sizes",
    "knee": "two hosts, rates around the knee",
    "hosts": "three and four hosts",
    "shared": "two ranks behind one NIC",
    "cpu": "two hosts that compute",
    "replicas": "replicas, rehearsed",
    "copies": "replicas that compute",
}


def summarise(results: Sequence[Result]) -> bool:
    """Print means and worst cases by question, and the knee; whether the goals hold."""
    print()
    for what, title in TITLES.items():
        for overlap in (True, False):
            some = [abs(r.error) for r in results if r.point.what == what and r.point.overlap == overlap]
            if some:
                mode = "overlapped" if overlap else "blocking"
                print(f"{title:34} {mode:10} {len(some):2} runs: mean {np.mean(some):.1%}, worst {max(some):.1%}")
    mean = float(np.mean([abs(r.error) for r in results]))
    print(f"\nall {len(results)} runs: mean error {mean:.2%}   goal {GOAL:.0%}: {'held' if mean <= GOAL else 'MISSED'}")
    held = mean <= GOAL
    around = [r for r in results if r.point.what == "knee"]
    if around:
        rates = [r.point.rate for r in around]
        predicted, measured = (
            find_knee(rates, [getattr(r, name) for r in around]) for name in ("predicted_s", "measured_s")
        )
        error = (predicted - measured) / measured
        verdict = "held" if abs(error) <= KNEE_GOAL else "MISSED"
        print(
            f"the knee: predicted {predicted / MBIT:.0f} Mbit/s, measured {measured / MBIT:.0f} Mbit/s, {error:+.1%}   "
            f"goal {KNEE_GOAL:.0%}: {verdict}"
        )
        held &= abs(error) <= KNEE_GOAL
    return held


def end_cleanly(number: int, frame: object) -> None:
    """A signal that asks to end is an exception like any other: contexts are left, and hosts end."""
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few points only")
    parser.add_argument("--only", choices=list(TITLES), action="append", help="only these questions")
    parser.add_argument("--rate", type=float, action="append", metavar="MBIT", help="only these rates")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each run")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run directories here, for gpipe compare")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    add_option(parser)
    arguments = parser.parse_args()
    if missing := what_is_missing():
        print(f"left out: hosts of network namespaces need {', '.join(missing)}")
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_cleanly)
    chosen = [p for p in points(quick=arguments.quick) if not arguments.only or p.what in arguments.only]
    chosen = [p for p in chosen if not arguments.rate or p.rate / MBIT in arguments.rate]
    if not chosen:
        parser.error("no run is of these questions and rates, expected some of those that are listed without them")
    results = []
    with tempfile.TemporaryDirectory() as name, Hosts(max(p.hosts for p in chosen)) as hosts:
        print(f"{len(hosts.all)} hosts are there; {len(chosen)} runs follow", flush=True)
        folder = arguments.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        runner, profile = Runner(hosts, folder.resolve()), Path(name, "profile.json")
        for rate in sorted({p.rate for p in chosen}):
            hosts.set_rate(rate)
            here = [p for p in chosen if p.rate == rate]
            network = runner.probe(max(max(p.message_bytes, p.weight_bytes) for p in here))
            found = f"{network.bandwidth / MB:.1f} MB/s, {network.latency * 1e6:.0f} us"
            print(f"       {rate / MBIT:6.0f} Mbit/s probed as {found}", flush=True)
            for point in here:
                if point.device == "cpu" and not profile.is_file():
                    size = TRANSFORMER_SAMPLES // NUM_MICROBATCHES
                    measure_profile(scenario_of(point, network), [size], 2, "cpu", Path(name, "work")).save(profile)
                plan = make_plan(scenario_of(point, network, profile if point.device == "cpu" else None))
                results.append(result_of(point, runner.run(point, plan, arguments.steps)))
                show(results[-1])
    held = summarise(results)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if errors := [r.error for r in results]:
        repeat = ".venv/bin/python benchmarks/network.py"
        headline = of_errors(
            "predict plans over real networks", errors, beside=f"{len(errors)} runs", goal=GOAL, repeat=repeat
        )
        save(arguments.rows, [headline])
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
