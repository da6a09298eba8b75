"""Measure a profile on this machine: what each layer costs at each micro-batch size, with every rank's core busy.

The measuring is done by processes that torchrun starts (`measure`); here they are started, watched, and their findings
put together. Each finished size is kept, so that an interrupted measurement goes on where it stopped.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from gpipe_exec.launch import worker_environment
from gpipe_sim.catalog import Link
from gpipe_sim.files import InputError, Problem, write_text
from gpipe_sim.plan import microbatch_sizes
from gpipe_sim.profile import COLUMNS, Profile
from gpipe_sim.scenario import Scenario


def sizes_for(scenarios: Iterable[Scenario]) -> tuple[int, ...]:
    """The micro-batch sizes that the scenarios need, and the powers of two below the largest."""
    needed = {
        size for scenario in scenarios for size in microbatch_sizes(scenario.batch, scenario.plan.num_microbatches or 1)
    }
    return tuple(sorted({*needed, *(2**n for n in range(max(needed).bit_length()))}))


def measure_profile(
    scenario: Scenario,
    sizes: Sequence[int],
    num_ranks: int,
    device: str,
    work: Path,
    advance: Callable[[], None] = lambda: None,
) -> Profile:
    """Measure on this machine with `num_ranks` processes; `advance` is called for each finished size.

    Each finished size is kept in `work`, so that an interrupted measurement goes on where it stopped.
    """
    work.mkdir(parents=True, exist_ok=True)
    request = {
        "scenario": scenario.document.data,
        "file": scenario.document.file,
        "sizes": list(sizes),
        "device": device,
    }
    text = json.dumps(request | {"ranks": num_ranks}, indent=1)
    request_file = work / "request.json"
    if not request_file.is_file() or request_file.read_text() != text:  # another model, device or set of sizes
        for old in work.glob("size*.json"):
            old.unlink()
        write_text(request_file, text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    log = work / "profiler.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, "-m", "gpipe_exec.measure", str(work)],
            stdout=output,
            stderr=output,
            env=worker_environment(scenario),
        )
        done = 0
        try:
            while process.poll() is None:
                time.sleep(0.1)
                for _ in range(len(list(work.glob("size*.json"))) - done):
                    advance()
                    done += 1
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        told = [line for line in log.read_text().splitlines() if "Error" in line and "ChildFailedError" not in line]
        raise InputError([Problem("gpipe profile", "", f"a worker failed: {told[-1] if told else ''}; see {log}")])
    profile = _assemble(scenario, sizes, work, device)
    shutil.rmtree(work)  # the next measurement is a new one
    return profile


def _assemble(scenario: Scenario, sizes: Sequence[int], work: Path, device: str) -> Profile:
    by_size = [json.loads((work / f"size{size}.json").read_text()) for size in sizes]
    extras = json.loads((work / "extras.json").read_text())
    link = extras["link"] and Link(
        name="measured", bandwidth=extras["link"]["bandwidth"], latency=extras["link"]["latency"]
    )
    return Profile(
        source="measured",
        device=device,
        dtype=scenario.dtype,
        names=tuple(extras["names"]),
        sizes=tuple(sizes),
        table={column: np.array([entry[column] for entry in by_size], dtype=float).T for column in COLUMNS},
        parameter_bytes=np.array(extras["parameter_bytes"], dtype=float),
        optimizer_s=np.array(extras["optimizer_s"], dtype=float),
        input_bytes=extras["input_bytes"],
        action_overhead_s=extras["overheads"][0],
        hop_overhead_s=extras["overheads"][1],
        link=link,
        spread=np.array([entry["spread"] for entry in by_size], dtype=float).T,
        environment={name: str(value) for name, value in extras["environment"].items()},
    )
