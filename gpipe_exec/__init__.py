"""Execute a plan for real, with torch: the same action lists that the simulator runs, between real processes."""

from gpipe_exec.pipeline import Pipeline, pin_to_cores

__all__ = ["Pipeline", "pin_to_cores"]
