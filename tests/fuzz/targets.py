"""What is fuzzed: each reader, given a file with anything in it, raises `InputError` or returns something that can
be used. Shared by `tests/test_fuzz.py` (hypothesis) and `tests/fuzz/guided.py` (coverage-guided).
"""

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from gpipe_sim.base.files import InputError, read_json, read_yaml
from gpipe_sim.cost.pipedream import import_pipedream
from gpipe_sim.cost.profile import load_profile, parse_profile
from gpipe_sim.explain.predict import predict
from gpipe_sim.make.making import make_plan
from gpipe_sim.make.planfile import load_plan, plan_text
from gpipe_sim.plan.plan import Plan
from gpipe_sim.runs.compare import compare_run
from gpipe_sim.runs.directory import Measured, parse_measured, save_measured
from gpipe_sim.runs.kineto import measure_traces
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.show.terminal import comparison_table, plan_details, results_table
from gpipe_sim.step.simulate import simulate

SCENARIO = b"""\
name: everything
model:
  kind: layers
  layers:
    - {name: a, repeat: 2, forward: 1 ms, backward: 2 ms, overhead: 10 us, output: 1 MB, saved: 4 MB, parameters: 2 MB}
    - {name: b, forward: 3 ms}
batch: 8
dtype: fp32
optimizer: momentum
cluster:
  device: {memory: 8 GiB, compute: 1 TFLOP/s, bandwidth: 100 GB/s, efficiency: 0.4}
  memory_reserve: 1 GiB
  nodes: 2
  devices_per_node: 2
  link: {bandwidth: [10 GB/s, inf GB/s], latency: 5 us}
  network: {bandwidth: 10 Gbit/s, latency: 15 us}
  links: {1: {bandwidth: 12 GB/s, latency: 9 us}}
  overlap: false
  cores: 1
  slowdown: {1: 1.2}
  jitter: {cv: 0.05, samples: 2, seed: 3}
plan:
  stages: 3
  microbatches: [2, 3]
  checkpoint: {per_stage: [always, never, except_last]}
  schedule: 1f1b
  recompute: early
  backward: fifo
  balance: [[1, 1, 1]]
  placement: [0, 2, 1]
  window: 2
"""
TRANSFORMER = b"""\
name: transformer
model: {kind: transformer, layers: 4, hidden: 64, heads: 4, ffn: 128, vocab: 100, sequence: 16, attention: classic}
batch: 4
cluster: {device: a100-80gb, link: nvlink3}
plan: {stages: 2, microbatches: 2, schedule: gpipe}
"""
GRAPH = b"""\
node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
node2 -- LSTM(8, 8) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=[64.0; 8.0], \
parameter_size=32.0
node3 -- __getitem__(0) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=64.0, parameter_size=0.0
node4 -- Linear(8, 8) -- forward_compute_time=0.5, backward_compute_time=1.0, activation_size=16.0, parameter_size=64.0
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode1 -- node4
"""

_EVENT = '{"ph": "X", "cat": "%s", "name": "%s", "pid": 1, "tid": 1, "ts": %d.5, "dur": %d, "args": {"stream": 7%s}}'
TRACE = (
    '{"schemaVersion": 1, "distributedInfo": {"rank": 0}, "host_name": "one", "baseTimeNanoseconds": 5,\n'
    '"traceEvents": ['
    + ",\n".join(
        _EVENT % (category, name, 100 * at + late, length, more)
        for at, action in enumerate(("PP:0F0", "PP:0F1", "PP:0B0", "PP:0B1", "Optimizer.step#SGD.step"))
        for category, name, late, length, more in (
            ("user_annotation", action, 0, 90, ""),
            ("cpu_op", "aten::addmm", 10, 20, ""),
            ("cuda_runtime", "cudaLaunchKernel", 30, 1, f', "correlation": {at}'),
            ("kernel", "gemm", 40, 30, f', "correlation": {at}'),
        )
    )
    + "]}"
).encode()
"""Of a rank by itself, on a GPU."""

_MOST_WORK = 200
"""Actions of plans that are not only read but also predicted: fuzzing looks for breadth."""


def small_plan(folder: Path) -> Plan:
    """The plan whose run is read."""
    path = folder / "seed.yaml"
    path.write_bytes(TRANSFORMER)
    return make_plan(parse_scenario(read_yaml(path))[0])


def plan_of_trace(folder: Path) -> Plan:
    """The plan whose trace is read: the same on one rank."""
    path = folder / "alone.yaml"
    path.write_bytes(TRANSFORMER.replace(b"stages: 2", b"stages: 1, backward: fifo, checkpoint: never"))
    return make_plan(parse_scenario(read_yaml(path))[0])


def seeds(folder: Path) -> dict[str, list[bytes]]:
    """Valid files for each target, to be mutated."""
    plan = small_plan(folder)
    measured = folder / "measured.json"
    save_measured(Measured(device="cpu", engine="gpipe", steps=(simulate(plan),), peak_memory_bytes=(1, 2)), measured)
    return {
        "scenario": [SCENARIO, TRANSFORMER],
        "plan": [plan_text(plan).encode()],
        "profile": [plan.profile.to_json().encode()],
        "pipedream": [GRAPH],
        "run": [measured.read_bytes()],
        "trace": [TRACE, TRACE.replace(b"kernel", b"other")],
    }


def use(plan: Plan) -> None:
    """What was read can be predicted, printed and written, if that is a small matter."""
    jitter = plan.scenario.cluster.jitter
    if plan.num_stages * plan.num_microbatches * (jitter.samples if jitter else 1) > _MOST_WORK:
        return
    prediction = predict(plan, keep_step=True)
    json.dumps(prediction.to_dict(), allow_nan=False)
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), width=80)
    console.print(results_table(plan.scenario.name, [prediction], 80))
    console.print(plan_details(prediction, 80))
    plan_text(plan).encode()


def _scenario(path: Path) -> None:
    sweep = parse_scenario(read_yaml(path))
    for scenario in sweep[:4]:
        use(make_plan(scenario))


def _profile(path: Path) -> None:
    profile = load_profile(path)
    profile.at(3)
    path.write_text(profile.to_json())
    again = parse_profile(read_json(path))
    assert again.names == profile.names
    assert (again.at(3).forward_s == profile.at(3).forward_s).all()


def make_targets(folder: Path) -> dict[str, Callable[[bytes], bool]]:
    """Name -> a function that reads bytes as a file of that kind; whether they were accepted."""
    plan, number = small_plan(folder), itertools.count()
    alone, traces = plan_of_trace(folder), folder / "traces"
    traces.mkdir(exist_ok=True)

    def run(path: Path) -> None:
        comparison = compare_run(plan, parse_measured(read_json(path), plan))
        json.dumps(comparison.to_dict(), allow_nan=False)
        Console(file=io.StringIO(), width=80).print(comparison_table(comparison))

    def trace(path: Path) -> None:
        (traces / "rank0.json").write_bytes(path.read_bytes())
        compared = compare_run(alone, measure_traces(alone, traces))
        json.dumps(compared.to_dict(), allow_nan=False)

    readers: dict[str, Callable[[Path], object]] = {
        "scenario": _scenario,
        "plan": lambda path: use(load_plan(path)),
        "profile": _profile,
        "pipedream": lambda path: import_pipedream(path, 4).to_json(),
        "run": run,
        "trace": trace,
    }

    def target(read: Callable[[Path], object]) -> Callable[[bytes], bool]:
        def accepts(content: bytes) -> bool:
            path = folder / f"{next(number)}.yaml"  # a name of its own: profiles are remembered by theirs
            path.write_bytes(content)
            try:
                read(path)
            except InputError as error:
                told = str(error)
                assert told, "a refusal says why"
                assert len(told) < 50_000, "and can be read"
                told.encode()
                return False
            finally:
                path.unlink()
            return True

        return accepts

    return {name: target(read) for name, read in readers.items()}
