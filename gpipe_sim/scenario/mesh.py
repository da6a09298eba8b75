"""Mesh: how the devices of a plan are numbered, and so which of them share a node.

K ranks of D replicas, each rank a tensor group of T devices. Numbers count the first dimension of an order through,
then the second, then the last; in nodes of four, with K = 4, D = 2, T = 1:

    [tensor, data, pipeline]                    [tensor, pipeline, data]

    rank      0  1 | 2  3                       rank      0  1  2  3
    replica 0 0  2 | 4  6                       replica 0 0  1  2  3    one node
    replica 1 1  3 | 5  7                       replica 1 4  5  6  7    the other
              sums stay inside a node                     messages do
"""

from typing import Literal, NamedTuple

Dimension = Literal["tensor", "data", "pipeline"]
Dimensions = tuple[Dimension, Dimension, Dimension]
SUMS_INSIDE: Dimensions = ("tensor", "data", "pipeline")
MESSAGES_INSIDE: Dimensions = ("tensor", "pipeline", "data")
"""The orders in which devices may be numbered. A tensor group exchanges every layer: its devices come first in both."""


class Mesh(NamedTuple):
    """The devices of a plan, by rank and replica."""

    ranks: int
    """One more than the highest rank: what a replica has numbers for, whether it uses all of them or not."""
    replicas: int = 1
    tensor: int = 1
    order: Dimensions = SUMS_INSIDE

    @property
    def messages_inside(self) -> bool:
        """Whether the ranks of a replica have numbers that follow each other."""
        return self.order == MESSAGES_INSIDE and self.replicas > 1

    def number(self, rank: int, replica: int = 0) -> int:
        """The number of a replica's rank; of a tensor group, of its first device."""
        place = replica * self.ranks + rank if self.messages_inside else rank * self.replicas + replica
        return place * self.tensor

    def place(self, number: int) -> tuple[int, int]:
        """The rank and the replica of a device."""
        first, second = divmod(number // self.tensor, self.ranks if self.messages_inside else self.replicas)
        return (second, first) if self.messages_inside else (first, second)

    @property
    def block(self) -> int:
        """Devices that follow each other with one rank of all replicas, or one replica of all ranks."""
        return (self.ranks if self.messages_inside else self.replicas) * self.tensor

    def is_alike(self, devices_per_node: int) -> bool:
        """Whether replicas meet the borders of nodes alike: as many blocks in each node, or nodes in each block; and
        if replicas are blocks, as many of them in every node."""
        g, block = devices_per_node, self.block
        if self.ranks * self.replicas * self.tensor <= g:
            return True
        if self.messages_inside and g % block == 0:
            return self.replicas % (g // block) == 0
        return g % block == 0 or block % g == 0

    def group(self, devices_per_node: int | None) -> tuple[int, int]:
        """How many of the ranks that hold the same stages are in each node, and in how many nodes they are."""
        g, D = devices_per_node, self.replicas
        if g is None or self.ranks * D * self.tensor <= g:
            return D, 1
        per_node = min(max(g // (self.block if self.messages_inside else self.tensor), 1), D)
        return per_node, D // per_node
