"""Measure a profile on this machine: what each layer costs at each micro-batch size, with every rank's core busy.

The measuring is done by processes of their own (`measure.worker`); here they are started, watched, and their findings
put together. Each finished size is kept, so that an interrupted measurement goes on where it stopped.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from gpipe_exec.devices.autopsy import beats_of, failure, where_ranks_stand
from gpipe_exec.devices.environment import worker_environment
from gpipe_exec.devices.supervision import FIRST_S, STARTING_S, Watched, ranks_of_this_machine
from gpipe_sim.base.files import write_text
from gpipe_sim.cost.profile import ATTENTION_COLUMNS, COLUMNS, SPLIT_COLUMNS, Profile
from gpipe_sim.plan.stages import microbatch_sizes
from gpipe_sim.scenario.catalog import Link
from gpipe_sim.scenario.schema import Scenario


class MeasureError(RuntimeError):
    """The measurement failed; the message says which rank, and why."""


def sizes_for(scenarios: Iterable[Scenario]) -> tuple[int, ...]:
    """The micro-batch sizes that the scenarios need, and the powers of two below the largest."""
    needed = {
        size
        for scenario in scenarios
        for size in microbatch_sizes(scenario.plan.share(scenario.batch), scenario.plan.num_microbatches or 1)
    }
    return tuple(sorted({*needed, *(2**n for n in range(max(needed).bit_length()))}))


def measure_profile(
    scenario: Scenario,
    sizes: Sequence[int],
    num_ranks: int,
    device: str,
    work: Path,
    advance: Callable[[], None] = lambda: None,
    timeout: float = 120.0,
    *,
    one_by_one: bool = False,
) -> Profile:
    """Measure on this machine with `num_ranks` processes; `advance` is called for each finished size.

    With `one_by_one`, one layer at a time is on the device, and each kind of layer is measured once. Each finished size
    is kept in `work`, so that an interrupted measurement goes on where it stopped.
    """
    work.mkdir(parents=True, exist_ok=True)
    request = {
        "scenario": scenario.document.data,
        "file": scenario.document.file,
        "sizes": list(sizes),
        "device": device,
        "one_by_one": one_by_one,
    }
    text = json.dumps(request | {"ranks": num_ranks}, indent=1)
    request_file = work / "request.json"
    if not request_file.is_file() or request_file.read_text() != text:  # another model, device or set of sizes
        for old in work.glob("size*.json"):
            old.unlink()
        write_text(request_file, text)
    (work / "extras.json").unlink(missing_ok=True)
    for old in (work / "ranks", work / "logs"):
        shutil.rmtree(old, ignore_errors=True)
    logs = work / "logs"
    logs.mkdir()
    worker, environment = ["gpipe_exec.measure.worker", str(work)], worker_environment(scenario)
    with ranks_of_this_machine(num_ranks, worker, logs, environment, fork=device != "cuda") as watched:
        hung = _supervise(watched, num_ranks, work, timeout, advance)
        standing = where_ranks_stand(work, num_ranks, watched.ranks()) if hung else None
    finished = [(work / "extras.json").is_file()] * num_ranks
    if hung or watched.process.returncode != 0 or not all(finished):
        hang = f"nothing was measured for {timeout:g} s" if hung else None
        told = failure(work, finished, ended=watched.ended, hung=hang, standing=standing).rstrip()
        raise MeasureError(f"{told}\nits logs are in {logs}; what was measured until then is kept")
    profile = _assemble(scenario, sizes, work, device)
    shutil.rmtree(work)  # the next measurement is a new one
    return profile


def _supervise(watched: Watched, num_ranks: int, work: Path, timeout: float, advance: Callable[[], None]) -> bool:
    """Wait for the end, reporting progress; True if it was not to be expected any more."""
    done, beats, cpu_s, last = 0, 0, 0.0, time.monotonic()
    began = last
    while True:
        ended = watched.wait(0.1)
        for _ in range(len(list(work.glob("size*.json"))) - done):
            advance()
            done += 1
        if (now := beats_of(work)) != beats:
            beats, last = now, time.monotonic()
        elif not beats and watched.cpu_s() > cpu_s + 0.5 and time.monotonic() - began < STARTING_S:
            cpu_s, last = watched.cpu_s(), time.monotonic()
        if ended or time.monotonic() - last > timeout + (0.0 if beats else FIRST_S):
            return not ended


def _assemble(scenario: Scenario, sizes: Sequence[int], work: Path, device: str) -> Profile:
    by_size = [json.loads((work / f"size{size}.json").read_text()) for size in sizes]
    extras = json.loads((work / "extras.json").read_text())
    link = extras["link"] and Link(
        name="measured", bandwidth=extras["link"]["bandwidth"], latency=extras["link"]["latency"]
    )
    attention = ATTENTION_COLUMNS if ATTENTION_COLUMNS[0] in by_size[0] else ()
    tensor = ("tensor_s",) if "tensor_s" in by_size[0] else ()
    columns = (*COLUMNS, *SPLIT_COLUMNS, *attention, *tensor, "freed_bytes")
    ends = sorted({(made, used) for entry in by_size for made, used, _ in entry["skips"]})
    return Profile(
        source="measured",
        device=device,
        dtype=scenario.dtype,
        names=tuple(extras["names"]),
        sizes=tuple(sizes),
        table={column: np.array([entry[column] for entry in by_size], dtype=float).T for column in columns},
        parameter_bytes=np.array(extras["parameter_bytes"], dtype=float),
        optimizer_s=np.array(extras["optimizer_s"], dtype=float),
        input_bytes=extras["input_bytes"],
        action_overhead_s=extras["overheads"][0],
        hop_overhead_s=extras["overheads"][1],
        link=link,
        spread=np.array([entry["spread"] for entry in by_size], dtype=float).T,
        environment={name: str(value) for name, value in extras["environment"].items()},
        precision=scenario.precision if scenario.dtype in ("bf16", "fp16") else None,
        skips=tuple((*pair, tuple(_skipping(entry["skips"], pair) for entry in by_size)) for pair in ends),
        tensor=scenario.plan.tensor,
        sequence_split=scenario.plan.sequence_split if scenario.plan.tensor > 1 else None,
    )


def _skipping(skips: Sequence[Sequence[float]], ends: tuple[int, int]) -> float:
    """Bytes that are handed on from one layer to another."""
    return float(sum(amount for made, used, amount in skips if (made, used) == ends))
