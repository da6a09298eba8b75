"""Layers that recompute themselves in their own backward (``plan.recompute_unit``).

With ``layer`` only a layer's input is kept, and all of its forward is run again:

    forward        without gradients; its output, the next layer's input, is all that remains
    backward       the forward again, then the backward of what it left

With ``attention`` everything is kept but the part of attention that grows with the square of the sequence: scores,
softmax, dropout and weighted sum are run again from queries, keys and values (selective recomputation, Korthikanti et
al., arXiv 2205.05198, section 5: what is kept of a block falls from sh(34 + 5as/h) to 34sh bytes).

Where a profile says what passes need then, that is taken; otherwise as much more as is made again.

The model's last layer is as it was: the loss follows its forward, and what the loss keeps would not go away. In a
backward's bytes what is recomputed comes beside what enters and leaves it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from gpipe_sim.base.arrays import Array
from gpipe_sim.cost.profile import SPLIT_COLUMNS, Profile
from gpipe_sim.scenario.schema import RecomputeUnit


def recomputed_in_backward(profile: Profile, unit: RecomputeUnit) -> Profile:
    """The profile of the same layers, each of which recomputes itself or its attention, without split backwards.

    A whole stage does so in actions of its own, and its layers are as they were.
    """
    if unit == "stage":
        return profile
    return _recomputed_by_layer(profile) if unit == "layer" else _recomputed_attention(profile)


@lru_cache(maxsize=64)
def _recomputed_attention(profile: Profile) -> Profile:
    """Layers without attention are as they were."""
    old = profile.table
    again = old["attention_bytes"]
    changed = {
        "backward_s": old["backward_s"] + old["attention_s"],
        "saved_bytes": old["saved_bytes"] - again,
        **{name: old.get(f"attention_{name}", old[name] + again) for name in ("workspace_forward_bytes", *_BACKWARD)},
    }
    return replace(profile, table=_whole(old) | changed)


@lru_cache(maxsize=64)
def _recomputed_by_layer(profile: Profile) -> Profile:
    old = profile.table
    again = np.ones((profile.num_layers, 1))
    again[-1] = 0.0

    def either(recomputed: Array, column: str) -> Array:
        chosen: Array = np.where(again > 0, recomputed, old[column])
        return chosen

    inside = old["saved_bytes"]
    handed_on = np.array([profile.at(size).handed_on_bytes for size in profile.sizes]).T
    needs = {name: np.maximum(old[name], old["workspace_forward_bytes"]) for name in _BACKWARD}
    changed = {
        "backward_s": old["backward_s"] + again * old["forward_s"],
        "saved_bytes": either(old["output_bytes"] - handed_on, "saved_bytes"),
        "workspace_forward_bytes": either(old["workspace_no_grad_bytes"], "workspace_forward_bytes"),
        **{name: either(inside + needs[name], name) for name in _BACKWARD},
    }
    return replace(profile, table=_whole(old) | changed)


def _whole(table: Mapping[str, Array]) -> dict[str, Array]:
    """Without what is no longer known of a backward."""
    return {name: values for name, values in table.items() if name not in (*SPLIT_COLUMNS, "freed_bytes")}


_BACKWARD = ("workspace_backward_bytes", "workspace_accumulate_bytes")
