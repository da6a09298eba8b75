"""What a search knows of its space: profile, setups with rough bounds, tables, and every plan that was evaluated."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from gpipe_sim.cost.analytic import build_profile
from gpipe_sim.make.making import stage_costs
from gpipe_sim.plan.partition import partition
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.stages import microbatch_sizes
from gpipe_sim.scenario.schema import Checkpoint
from gpipe_sim.search.choices import Space
from gpipe_sim.search.cuts import Cutter, Modes
from gpipe_sim.search.judge import Judge
from gpipe_sim.search.rough import RoughBounds
from gpipe_sim.search.setups import Setup, has_every_placement, setups_of


class Subspace(NamedTuple):
    """A setup with the borders between which its layers may be cut, and the modes that its stages may have."""

    setup: Setup
    borders: tuple[int, ...]
    modes: Modes


class Searcher:
    """One space, its setups by bound, and what has been evaluated."""

    def __init__(self, space: Space, known_s: float = np.inf) -> None:
        """`known_s` is the step time of a plan outside of the space that fits in the devices' memory."""
        self.space, self.scenario, self.judge, self._known_s = space, space.scenario, Judge(), known_s
        sizes = {n for M in space.microbatches for n in microbatch_sizes(self.scenario.samples, M)}
        self.profile = build_profile(self.scenario, sizes)
        self.cutter = Cutter(self.scenario, self.profile)
        rough = RoughBounds(self.scenario, self.profile, space.microbatches)
        known = {one: rough.of(one.setup, one.modes) for one in self._subspaces()}
        self.subspaces = sorted(known, key=lambda one: known[one].estimate_s)
        """The most promising first."""
        self.by_setup = {one.setup: one for one in self.subspaces}
        self.bounds = {one: its.bound_s for one, its in known.items()}
        """Rough ones, as the next."""
        self.estimates = {one: its.estimate_s for one, its in known.items()}
        self.is_complete = has_every_placement(space)
        """Whether every plan of the space is in one of them."""
        self.looked_at: set[Subspace] = set()
        """Setups that came into question so far."""
        self.smallest_bottleneck = lru_cache(maxsize=512)(self._smallest_bottleneck)

    def _subspaces(self) -> Iterator[Subspace]:
        num_layers = self.profile.num_layers
        for setup in setups_of(self.space, num_layers):
            for modes in self.space.checkpoints or (None,):
                if isinstance(modes, tuple) and len(modes) != setup.num_stages:
                    continue
                if self.space.balances is None:
                    yield Subspace(setup, tuple(range(num_layers + 1)), modes)
                for balance in self.space.balances or ():
                    if len(balance) == setup.num_stages:
                        yield Subspace(setup, (0, *accumulate(balance)), modes)

    def _smallest_bottleneck(
        self, num_microbatches: int, modes: tuple[Checkpoint, ...], slowdowns: tuple[float, ...]
    ) -> tuple[int, ...]:
        """The cut that `gpipe simulate` would choose."""
        sizes = microbatch_sizes(self.scenario.samples, num_microbatches)
        return partition(stage_costs(self.profile, sizes, modes, list(slowdowns)))

    def known_s(self, limit: float) -> float:
        """The step time of a plan outside of the space that is within a limit of memory; infinite if none is known."""
        return self._known_s if limit >= self.scenario.cluster.memory_limit else np.inf

    def plan(self, setup: Setup, balance: tuple[int, ...], modes: tuple[Checkpoint, ...]) -> Plan:
        """In this space."""
        return setup.plan(self.scenario, self.profile, balance, modes)
