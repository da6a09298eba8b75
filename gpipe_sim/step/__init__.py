"""One training step: simulated with events or evaluated without, its memory and its metrics."""
