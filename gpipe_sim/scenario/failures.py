"""How often things fail: published rates by name, and where they were published.

A rate is failures per second of one part: a device, a node (everything of it but its devices), a node's way into the
network, the software on a node, or the job as a whole, whatever its size. They are independent and exponential, so they
add up:

    rate of a job = devices x device + nodes x (node + network + software) + job
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class FailureRates:
    """Failures per second of one part of each kind."""

    name: str
    device: float = 0.0
    """Of one device. A node whose device has failed is repaired before it works again."""
    node: float = 0.0
    """Of the rest of a node: host, disk, power, unplanned maintenance. It is repaired, too."""
    network: float = 0.0
    """Of a node's way into the network: cards, cables, switches. The job starts again on the same nodes."""
    software: float = 0.0
    """Of what runs on a node: more nodes, more of its rare cases. The job starts again on the same nodes."""
    job: float = 0.0
    """Of the whole job, whatever its size: people, a data loader. It starts again on the same nodes."""
    source: str = field(default="scenario", compare=False)


def _counted(name: str, days: float, nodes: int, devices: int, source: str, **counts: float) -> FailureRates:
    """Rates from what was counted in so many days on so many parts."""
    parts = {"device": devices, "node": nodes, "network": nodes, "software": nodes}
    rates = {kind: count / (days * DAY * parts[kind]) for kind, count in counts.items()}
    return FailureRates(name=name, source=source, **rates)


_PUBLISHED = [
    # Table 5 by kind. device: faulty GPU 148, HBM3 72, SRAM 19, system processor 17, silent data corruption 6, thermal
    # interface and sensor 6. node: host maintenance 32, SSD 3, power supply 3, chassis 2, IO expansion board 2, CPU 2,
    # system memory 2. network: switch or cable 35, NIC 7. software: bug 54, NCCL watchdog timeouts 7, dependency 2, and
    # the 47 planned interruptions, which the text counts among the 466. All in proportion to the nodes of another job.
    _counted(
        "llama3",
        54,
        2048,
        16384,
        "Grattafiori et al., arXiv 2407.21783, section 3.3.4 and Table 5: 466 interruptions in 54 days on 16,384 H100",
        device=268,
        node=46,
        network=42,
        software=63 + 47,
    ),
    # Section 2.5: at least 35 manual restarts and some 70 automatic ones because of hardware, in two months, with hosts
    # cycled out; 992 devices, of which each node has 8 (section 2.4).
    _counted(
        "opt175b",
        60,
        124,
        992,
        "Zhang et al., arXiv 2205.01068, section 2.5: 35 manual and 70 automatic restarts in two months on 992 A100",
        node=35 + 70,
    ),
    # Hardware that ends jobs, of all sizes together. The paper projects 1.8 h between failures of 16,384 devices from
    # the first rate; what it measured for jobs of 1,024 devices is a quarter of what follows for them.
    *(
        _counted(name, 1000, 1, 8, f"Kokolis et al., arXiv 2410.21680: {count} failures in 1,000 node-days", node=count)
        for name, count in (("rsc1", 6.50), ("rsc2", 2.34))
    ),
]

FAILURES: Mapping[str, FailureRates] = MappingProxyType({rates.name: rates for rates in _PUBLISHED})
