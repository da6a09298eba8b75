"""Execute a plan for real, with torch: the same action lists that the simulator runs, between real processes.

What it offers is imported when it is asked for, since torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_exec.devices.process import leave
    from gpipe_exec.engine.checkpoint import read_model
    from gpipe_exec.engine.pipeline import Pipeline, pin_to_cores
    from gpipe_exec.engine.selective import attention
    from gpipe_exec.engine.world import plan_for_world
    from gpipe_exec.modules.huggingface import split_huggingface, token_loss
    from gpipe_exec.modules.splitting import split

__all__ = [
    "Pipeline",
    "attention",
    "leave",
    "pin_to_cores",
    "plan_for_world",
    "read_model",
    "split",
    "split_huggingface",
    "token_loss",
]

_MODULES = {
    "Pipeline": "gpipe_exec.engine.pipeline",
    "attention": "gpipe_exec.engine.selective",
    "leave": "gpipe_exec.devices.process",
    "pin_to_cores": "gpipe_exec.engine.pipeline",
    "plan_for_world": "gpipe_exec.engine.world",
    "read_model": "gpipe_exec.engine.checkpoint",
    "split": "gpipe_exec.modules.splitting",
    "split_huggingface": "gpipe_exec.modules.huggingface",
    "token_loss": "gpipe_exec.modules.huggingface",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
