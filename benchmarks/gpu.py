"""Does it work on this machine's GPUs? Exactness, profile, run, compare and a killed rank, ending in one report.

Nobody has run this on a GPU yet: what the project says of GPUs stands on NCCL's rules, which its tests keep without
one. Each part is a command with a limit of time; one that fails does not keep the next from being tried.

Run with: make gpu. `--device cpu` tries the commands themselves where there is no GPU.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
GPIPE = [sys.executable, "-m", "gpipe_sim.cli"]
SCENARIO = """\
name: gpu
model: {{kind: transformer, {shape}}}
profile: profile.json
batch: 16
dtype: fp32
cluster: {{device: {{memory: 16 GiB}}, devices_per_node: {K}, link: {{bandwidth: 10 GB/s, latency: 10 us}}}}
plan: {{stages: {K}, microbatches: 4, checkpoint: except_last, schedule: 1f1b}}
"""
SHAPE = "layers: 8, hidden: 512, heads: 8, vocab: 4096, sequence: 256"
SHAPE_FOR_CPU = "layers: 4, hidden: 64, heads: 4, vocab: 256, sequence: 32"
"""Small enough for a core: there it is about the commands, not about the model."""
FAULTY = """\
model: {kind: python, function: faults:model}
profile: fault.json
batch: 8
dtype: fp32
cluster: {device: {memory: 16 GiB}, devices_per_node: 2, link: {bandwidth: 1 GB/s, latency: 10 us}}
plan: {stages: 2, microbatches: 4, checkpoint: never}
"""


class Part(NamedTuple):
    """One command, and what it is to say if it is to fail."""

    name: str
    command: list[str]
    limit_s: float
    fails_with: str | None = None
    fault: str = "none:0:F:0"


def parts(device: str, num_ranks: int, folder: Path) -> list[Part]:
    """In the order in which each needs the one before."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    workers = ROOT / "tests" / "workers"
    planned, faulty, run = (str(folder / name) for name in ("scenario.yaml", "fault.yaml", "run"))
    on = ["--device", device]
    return [
        Part("exactness of every schedule", [*torchrun, str(workers / "exactness.py")], 900),
        Part(
            "exactness of replicas, shards and tied weights",
            [
                *torchrun,
                str(workers / "replicas.py"),
                str(num_ranks // 2 if num_ranks % 2 == 0 else 1),
                str(folder / "saved"),
            ],
            600,
        ),
        Part("profile", [*GPIPE, "profile", planned, *on, "--out", str(folder / "profile.json")], 600),
        Part("link", [*torchrun, "-m", "gpipe_exec.probe", *on], 120),
        Part("run", [*GPIPE, "run", planned, *on, "--out", run, "--timeout", "120"], 600),
        Part("compare", [*GPIPE, "compare", run], 60),
        Part(
            "profile of the model with a fault",
            [*GPIPE, "profile", faulty, *on, "--out", str(folder / "fault.json")],
            300,
        ),
        Part(
            "a killed rank",
            [*GPIPE, "run", faulty, *on, "--out", str(folder / "killed"), "--timeout", "20"],
            200,
            fails_with="rank 1 was killed by SIGKILL",
            fault="kill:1:B:2",
        ),
    ]


def main() -> None:
    """Try every part; the report says what came of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="what to try it on (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="where the report goes (%(default)s)")
    arguments = parser.parse_args()
    found = torch.accelerator.device_count() if arguments.device != "cpu" else 2
    if found < 2:
        parser.error(f"found {found} devices of kind {arguments.device}, expected two or more")
    num_ranks = min(4, found)
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    scenario = SCENARIO.format(K=num_ranks, shape=SHAPE_FOR_CPU if arguments.device == "cpu" else SHAPE)
    (folder / "scenario.yaml").write_text(scenario)
    (folder / "faults.py").write_text((ROOT / "tests" / "workers" / "faults.py").read_text())
    (folder / "fault.yaml").write_text(FAULTY)
    where = f"{num_ranks} ranks on {arguments.device}"
    lines = [f"{platform.node()}, {platform.platform()}, torch {torch.__version__}, {where}"]
    if arguments.device != "cpu":
        module = torch.get_device_module(arguments.device)
        lines += [f"device {index}: {module.get_device_name(index)}" for index in range(found)]
    failed = 0
    for part in parts(arguments.device, num_ranks, folder):
        began = time.perf_counter()
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = os.environ | {
            "PYTHONPATH": path,
            "GPIPE_TEST_DEVICE": arguments.device,
            "GPIPE_FAULT": part.fault,
        }
        try:
            done = subprocess.run(
                part.command, capture_output=True, text=True, timeout=part.limit_s, check=False, env=environment
            )
            told = done.stdout[-3000:] + done.stderr[-3000:]
            right = done.returncode == 0 if part.fails_with is None else part.fails_with in told
        except subprocess.TimeoutExpired as error:
            right, told = False, f"no end after {part.limit_s:.0f} s\n{error.stdout or ''}"
        failed += not right
        verdict = f"{'ok' if right else 'FAILED':6} {part.name} ({time.perf_counter() - began:.0f} s)"
        print(verdict, flush=True)
        lines += ["", verdict, " ".join(part.command), told]
    report = folder / "report.txt"
    report.write_text("\n".join(lines) + "\n")
    print(f"{failed} of {len(parts('cpu', 2, folder))} parts failed; please send {report}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
