"""What stages cost: the figures of their layers, summed, by micro-batch and for many cuts of the same layers at once.

layers    | f0  f1  f2 | f3  f4 |        balance 3 2
stages    |   f0+f1+f2 | f3+f4  |        and so for each micro-batch, by its size, and for each cut
"""

from collections.abc import Sequence

import numpy as np

from gpipe_sim.base.arrays import Array, Indices
from gpipe_sim.cost.profile import Profile
from gpipe_sim.scenario.schema import Checkpoint


def sum_by_stage(layers: Array, balances: Indices) -> Array:
    """Sums of a figure of each layer over each stage, for several balances (rows) of the same layers."""
    firsts = np.cumsum(balances, axis=1) - balances + len(layers) * np.arange(len(balances))[:, None]
    sums: Array = np.add.reduceat(np.tile(layers, len(balances)), firsts.ravel()).reshape(balances.shape)
    return sums


def microbatch_sizes(batch: int, num_microbatches: int) -> tuple[int, ...]:
    """N samples in M micro-batches; where M does not divide N the first N mod M hold one sample more."""
    size, larger = divmod(batch, num_microbatches)
    return (size + 1,) * larger + (size,) * (num_microbatches - larger)


def recomputed(mode: Checkpoint, num_microbatches: int) -> tuple[bool, ...]:
    """The checkpoint rule. ``except_last`` spares the last micro-batch: GPipe needs it again at once.

    never        F0 F1 F2          B2      B1      B0
    except_last  F0 F1 F2          B2   R1 B1   R0 B0
    always       F0 F1 F2       R2 B2   R1 B1   R0 B0
    """
    return (mode != "never",) * (num_microbatches - 1) + (mode == "always",)


def per_microbatch(by_size: Sequence[Array], sizes: Sequence[int]) -> Array:
    """Arrays for each size, the largest first, as one with an axis for micro-batches after the first."""
    if len(by_size) == 1:
        return np.repeat(by_size[0][:, None], len(sizes), axis=1)
    repeats = [sizes.count(size) for size in distinct(sizes)]
    return np.repeat(np.stack(by_size, axis=1), repeats, axis=1)


def distinct(sizes: Sequence[int]) -> list[int]:
    """The sizes of micro-batches, largest first: the order in which `microbatch_sizes` has them."""
    return sorted(set(sizes), reverse=True)


def stage_seconds(profile: Profile, column: str, balances: Indices, sizes: Sequence[int]) -> Array:
    """A column of the profile by stage, micro-batch and cut (a row of `balances`), in seconds of an unslowed rank."""
    costs = [getattr(profile.at(size), column) for size in distinct(sizes)]
    return per_microbatch([sum_by_stage(layers_s, balances).T for layers_s in costs], sizes)


def boundary_bytes(profile: Profile, balances: Indices, sizes: Sequence[int]) -> Array:
    """Bytes of a micro-batch between a stage and the next, by stage but the last, micro-batch and cut."""
    lasts = np.cumsum(balances, axis=1)[:, :-1].T - 1
    return per_microbatch([profile.at(size).output_bytes[lasts] for size in distinct(sizes)], sizes)
