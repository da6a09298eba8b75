"""The environment that a worker is started in."""

import os
import sys
from pathlib import Path

from gpipe_sim.scenario.schema import HuggingFaceModel, PythonModel, Scenario

STEADY = {
    "OMP_NUM_THREADS": "1",
    # Keep freed memory for the next step, instead of giving it back and faulting it in again page by page.
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
    "MALLOC_TOP_PAD_": str(2**26),
    # As many queues to a GPU as it has: in one of a few, a transfer would wait behind another that waits for it.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""What a worker is started with, unless the environment says otherwise."""
WITHIN = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").is_dir() else {}
"""Ranks of one machine: what they send each other, and where they listen for it, is not on its networks."""
SAFE = {"PYTHONSAFEPATH": "1"}
"""Python looks for no module in the folder where it is started."""


MODELS = "GPIPE_MODELS"
"""The folder in which a worker finds the user's own model, where the scenario names one."""


def worker_environment(scenario: Scenario) -> dict[str, str]:
    """This process's, with one thread per rank and a steady allocator unless set otherwise.

    Nothing that lies in the folder of a scenario is imported by a worker, such as a `queue.py` in place of Python's
    own. Where the scenario names a function of its own, that is looked for beside it, and last of all.
    """
    found = {MODELS: str(Path(scenario.document.file).resolve().parent)} if _is_own(scenario) else {}
    ours = Path(__file__).parents[2]
    if ours == Path.cwd():  # started in a checkout that is not installed, where workers would not find us otherwise
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ours)]))
    return STEADY | {name: value for name, value in os.environ.items() if name != MODELS} | found


def _is_own(scenario: Scenario) -> bool:
    return isinstance(scenario.model, PythonModel | HuggingFaceModel)


def folder_of(scenario: Scenario) -> Path:
    """Where the files lie that a scenario names: in a worker, that of the scenario that its plan came from."""
    return Path(os.environ.get(MODELS) or Path(scenario.document.file).parent)


def find_own_models() -> None:
    """In a worker: modules beside the scenario can be imported from now on, if nothing else has their name."""
    if folder := os.environ.get(MODELS):
        sys.path.append(folder)
