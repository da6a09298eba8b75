"""The section ``campaign:`` of a scenario: what a training of weeks meets, beyond its steps.

    campaign:
      tokens: 300B
      failures: llama3
      checkpoint: {every: 30 min, mode: async, storage: 40 GB/s}
      detection: 2 min
      restart: 8 min
      spares: 1

Everything may be left out. `gpipe campaign` reads it; other commands only check it.
"""

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from gpipe_sim.base import units
from gpipe_sim.base.files import Strict, did_you_mean
from gpipe_sim.base.limits import shown
from gpipe_sim.scenario.failures import FAILURES, FailureRates

Duration = Annotated[float, PlainValidator(units.parse_duration)]
"""A time with its unit, such as ``90 s``, ``10 min``, ``8 h``, ``2 d`` or ``9 y``."""
Tokens = Annotated[float, PlainValidator(units.parse_tokens)]
"""A number of tokens, such as ``300B`` or ``1.5T``."""
"""What a device costs for an hour, with its currency, such as ``2.50 USD/h``."""
Storage = Annotated[float, PlainValidator(units.parse_bandwidth)]
"""A rate of bytes with its unit, such as ``40 GB/s``."""


class _FailureSpec(Strict):
    """Mean times between failures written out instead of named; what is left out does not fail."""

    device: Duration | None = None
    """Of one device."""
    node: Duration | None = None
    """Of one node, its devices and its network left out."""
    network: Duration | None = None
    """Of one node's way into the network."""
    software: Duration | None = None
    """Of what runs on one node."""
    job: Duration | None = None
    """Of the whole job, whatever its size: people, a data loader."""


def _to_failures(value: object) -> FailureRates:
    if isinstance(value, str):
        if value not in FAILURES:
            raise ValueError(f"found {shown(value)}, {did_you_mean(value, FAILURES)}")
        return FAILURES[value]
    if not isinstance(value, dict):
        raise ValueError(f"found {shown(value)}, expected a name or mean times between failures: {{device: 9 y, ...}}")
    spec = _FailureSpec.model_validate(value)
    times = {kind: time for kind, time in spec.model_dump().items() if time is not None}
    for kind, time in times.items():
        if time < 1:
            raise ValueError(f"{kind}: found {units.format_seconds(time)}, expected at least a second")
    return FailureRates(name="custom", **{kind: 1 / time for kind, time in times.items()})


FailuresField = Annotated[FailureRates, PlainValidator(_to_failures)]
"""A name that ``gpipe catalog`` lists, or mean times between failures written out, ``{device: 9 y, node: 3 y}``."""


def _to_interval(value: object) -> float | None:
    if value == "auto":
        return None
    try:
        return units.parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


IntervalField = Annotated[float | None, PlainValidator(_to_interval)]
"""A time with its unit, or ``auto``."""


class CheckpointSpec(Strict):
    """How what was learnt is saved, and what that costs."""

    every: IntervalField = None
    """How long to compute between two of them; ``auto`` takes the interval that loses least."""
    mode: Literal["blocking", "async"] = "blocking"
    """Training waits until a checkpoint is written, or only until it is copied into the hosts' memory."""
    storage: Storage = 10e9
    """At which all ranks together write a checkpoint, and read it."""
    to_host: Storage = 20e9
    """At which a device copies its part into its host's memory; of ``async`` only."""


class CampaignSpec(Strict):
    """A training of weeks: how much is trained, what fails, and what is done about it."""

    tokens: Tokens | None = None
    """How many are trained on; ``--tokens`` replaces it."""
    sequence: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Tokens in a sample; only for models that do not say so themselves."""
    failures: FailuresField = FAILURES["llama3"]
    """How often which parts fail."""
    detection: Duration = 120.0
    """From a failure until someone, or something, begins to restart."""
    restart: Duration = 600.0
    """From then to the first step, without reading the checkpoint: processes, groups, a first step that is slow."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """How what was learnt is saved."""
    spares: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Nodes that stand by, are paid for, and take the place of those that failed."""
    repair: Duration = 86400.0
    """Until a node that failed can be used again."""
    shrink: bool = True
    """Whether, without a spare, training goes on with fewer replicas until a node is back, or waits for it."""
    seeds: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """How many trainings are drawn."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The luck of the first; the same seeds draw the same luck for every plan."""
