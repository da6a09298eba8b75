"""Colours, the same in the terminal, the report and the dashboard; safe for colour-blind readers (Okabe and Ito)."""

from collections.abc import Mapping

KINDS: Mapping[str, str] = {"F": "#0072B2", "R": "#56B4E9", "B": "#E69F00", "U": "#009E73"}
"""Forward blue, its recomputation a lighter blue, backward orange, update green."""

KIND_NAMES: Mapping[str, str] = {"F": "forward", "R": "recompute", "B": "backward", "U": "update"}

LANES: Mapping[str, str] = {"send": "#CC79A7", "receive": "#BBBBBB"}
"""Messages on their way, and the time spent waiting for one."""

CRITICAL = "#D55E00"
"""The critical path, and whatever does not fit."""

MEMORY: Mapping[str, str] = {
    "parameters": "#0072B2",
    "optimizer": "#009E73",
    "gradients": "#E69F00",
    "inputs": "#F0E442",
    "activations": "#CC79A7",
    "workspace": "#56B4E9",
    "buffers": "#999999",
}

BREAKDOWN: Mapping[str, str] = {
    "compute": "#0072B2",
    "small_batches": "#F0E442",
    "recompute": "#56B4E9",
    "imbalance": "#D55E00",
    "fill_drain": "#BBBBBB",
    "overhead": "#666666",
    "communication": "#CC79A7",
    "contention": "#882255",
    "jitter": "#44AA99",
    "update": "#009E73",
}
