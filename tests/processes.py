"""Worker scripts with a process for each rank; a failure of theirs is the test's."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from gpipe_exec.devices.supervision import ranks_of_this_machine

TESTS = Path(__file__).parent
WORKERS = TESTS / "workers"


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def run_ranks(num_ranks: int, script: Path | str, *arguments: object, fails: bool = False, **environment: str) -> str:
    """Start a script of `workers`, or any other, as `gpipe run` starts its ranks; what they print, rank by rank.

    With `fails` they must.
    """
    worker = [str(WORKERS / script), *map(str, arguments)]
    afresh = "GPIPE_TEST_DEVICE" in environment
    with TemporaryDirectory() as logs:
        with ranks_of_this_machine(
            num_ranks, worker, Path(logs), _environment(**environment), fork=not afresh
        ) as watched:
            assert watched.wait(1200), "still running after twenty minutes"
        said = {
            name: "".join((Path(logs) / f"rank{rank}.{name}").read_text() for rank in range(num_ranks))
            for name in ("stdout", "stderr")
        }
    assert (watched.process.returncode != 0) == fails, said["stderr"][-6000:]
    return said["stdout"]


def torchrun(num_ranks: int, script: Path | str, *arguments: object, launcher: tuple[str, ...] = ()) -> str:
    """The same, started by torchrun, as people start theirs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*command, *launcher, str(WORKERS / script), *map(str, arguments)],
        env=_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
