"""Execute a plan for real, with torch: the same action lists that the simulator runs, between real processes."""

from gpipe_exec.pipeline import Pipeline, pin_to_cores
from gpipe_exec.process import leave

__all__ = ["Pipeline", "leave", "pin_to_cores"]
