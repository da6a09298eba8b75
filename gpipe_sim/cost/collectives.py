"""Collectives and tensor groups: how long ranks take to sum, gather or scatter, and what a layer costs each of T ranks.

A *sum* leaves every rank with the sum of all ranks' bytes, a *gather* with all of their shards, a *scatter* with its
own shard of the sum. On a ring of n ranks each sends 2 (n-1)/n of the bytes in 2 (n-1) turns for a sum, and half of
that for a gather or a scatter; a sum is a scatter and then a gather:

    sum       2 (n-1)/n bytes / bandwidth + 2 (n-1) latency
    gather      (n-1)/n bytes / bandwidth +   (n-1) latency           and scatter

A group that spans nodes does the part inside each node first, so that what crosses the network is a node's shard only:

    n ranks, g of them in each of m = n/g nodes
    scatter inside (all bytes, g) --> sum between nodes (bytes / g, m) --> gather inside (all bytes, g)
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from gpipe_sim.base.arrays import Array
from gpipe_sim.cost.transformer import DTYPE_BYTES, Layer, transformer_layers
from gpipe_sim.scenario.catalog import DType, Link
from gpipe_sim.scenario.schema import Cluster, Transformer

CollectiveKind = Literal["sum", "gather", "scatter"]
_Size = TypeVar("_Size", float, Array)
"""Bytes of one collective, or of many."""


def collective_s(kind: CollectiveKind, size: _Size, n: int, bandwidth: float, latency: float) -> _Size:
    """Seconds of a collective of n ranks on one ring; `size` is that of the whole, in bytes, not of a shard."""
    passes = 2 if kind == "sum" else 1
    return passes * (n - 1) * (size / n / bandwidth + latency)


def spanning_s(
    kind: CollectiveKind, size: _Size, per_node: int, nodes: int, link: Link, network: Link, sharers: int | None = None
) -> _Size:
    """Seconds of a collective of ``per_node`` ranks in each of ``nodes`` nodes: inside a node, then between nodes.

    The ranks of a node each have their own shard to exchange with their counterparts, at the same time, and ``sharers``
    of them through the same way out: left out, all of them, who together send all of a node's bytes, which is as if one
    did with all of its bandwidth.
    """
    own = network.bandwidth * per_node / (sharers or per_node)
    between = collective_s(kind, size, nodes, own, network.latency)
    inside = collective_s(kind, size, per_node, link.bandwidth, link.latency)
    return inside + between


@dataclass(frozen=True, kw_only=True)
class SlicedLayer:
    """A layer of which T ranks hold a slice each: what it costs one of them, per sample."""

    layer: Layer
    """Its own share; time and bytes as of a layer of this size."""
    gathers: int
    """Collectives in each pass, forward and backward alike, that are not overlapped: each gathers what T ranks hold in
    parts, or scatters their sums, of `collective_bytes` in all. Without a split sequence two of them are one sum."""
    collective_bytes: float


def sliced_layers(model: Transformer, dtype: DType, tensor: int, *, sequence: bool = True) -> list[SlicedLayer]:
    """The layers of a transformer on each of T ranks, as Megatron-LM slices them.

    Attention by heads and the feed-forward by columns, then rows: products, scores, their weights and what they keep
    are divided by T. Embedding and head are sliced by the vocabulary, so the logits too. Norms and residuals are whole
    on each rank or, with the sequence split, divided as well: then everything that is kept is, (34 + 5as/h) sh / T of
    a block's bytes, and without it sh (10 + 24/T + 5as/(hT)) (Korthikanti et al., arXiv 2205.05198, equations 2 and
    4). Weights of norms, and biases that are added after a sum, are whole on each rank.

    A block enters and leaves attention and feed-forward through collectives of its boundary, dsh: in each pass two
    sums, or with the sequence split two gathers and two scatters, which take as long. Heads of keys and values of
    which there are fewer than T are held by several ranks.
    """
    s, h = model.sequence, model.hidden
    d, mask, T = DTYPE_BYTES[dtype], 1 if model.drops else 0, tensor
    embedding, *blocks, norm, head = transformer_layers(model, dtype)
    if T == 1:
        return [SlicedLayer(layer=x, gathers=0, collective_bytes=0.0) for x in (embedding, *blocks, norm, head)]
    kv_heads = max(model.num_kv_heads, T)
    wide = model.model_copy(update={"kv_heads": kv_heads})  # what is held twice is also computed twice
    _, block, *_ = transformer_layers(wide, dtype)
    norms = 2 * norm.parameters
    whole_biases = 2 * h if model.biases == "all" else 0
    whole = s * h * (4 * d + 2 * mask)  # what norms, and the first product of each half, keep as input, and the masks
    share = 1 / T if sequence else 1.0
    own = replace(
        block,
        parameters=(block.parameters - norms - whole_biases) // T + norms + whole_biases,
        flops=block.flops / T,
        saved_bytes=(block.saved_bytes - whole) / T + whole * share,
        output_bytes=block.output_bytes * share,
        workspace_bytes=max(block.workspace_bytes / T, d * s * h),  # an input that was gathered
        kept_bytes=(block.kept_bytes - 4 * d * s * h) / T + 4 * d * s * h * share,
        attention_flops=block.attention_flops / T,
        attention_bytes=block.attention_bytes / T,
    )
    positions = model.num_positions * h
    first = replace(
        embedding,
        parameters=-(-model.vocab // T) * h + positions,
        saved_bytes=embedding.saved_bytes * share,
        output_bytes=embedding.output_bytes * share,
        kept_bytes=embedding.kept_bytes * share,
    )
    last = replace(
        head,
        parameters=-(-model.vocab // T) * h,
        flops=head.flops / T,
        saved_bytes=head.saved_bytes / T,
        output_bytes=head.output_bytes / T,
        workspace_bytes=head.workspace_bytes / T,
        kept_bytes=d * s * h * share + d * s * model.vocab / T,
    )
    between = replace(norm, saved_bytes=norm.saved_bytes * share, output_bytes=norm.output_bytes * share)
    boundary = float(d * s * h)
    return [
        SlicedLayer(layer=first, gathers=1, collective_bytes=boundary),
        *(SlicedLayer(layer=replace(own, name=x.name), gathers=4, collective_bytes=boundary) for x in blocks),
        SlicedLayer(layer=between, gathers=0, collective_bytes=0.0),
        SlicedLayer(layer=last, gathers=1, collective_bytes=boundary),
    ]


def sliced_collectives_s(sliced: SlicedLayer, samples: _Size, group: "TensorGroup") -> _Size:
    """Seconds of a layer's collectives in one pass over a micro-batch of so many samples, or of many."""
    return sliced.gathers * group.gather_s(samples * sliced.collective_bytes)


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Where the T ranks are that hold a layer together, and what connects them."""

    per_node: int
    nodes: int
    link: Link
    network: Link
    nics: int = 1

    def gather_s(self, size: _Size) -> _Size:
        """Seconds of a gather, or a scatter, of so many bytes in all."""
        sharers = -(-self.per_node // self.nics)
        return spanning_s("gather", size, self.per_node, self.nodes, self.link, self.network, sharers)


def tensor_group(cluster: Cluster, tensor: int) -> TensorGroup:
    """T ranks whose numbers follow each other: in one node, or in all of several, which may be behind several switches
    (all groups exchange at the pace of such a one)."""
    per_node = min(tensor, cluster.devices_per_node or tensor)
    nodes, behind = tensor // per_node, cluster.nodes_per_switch
    crosses = cluster.spine is not None and behind is not None and nodes > 1 and behind % nodes > 0
    network = (cluster.spine if crosses else cluster.network) or cluster.link
    return TensorGroup(per_node=per_node, nodes=nodes, link=cluster.link, network=network, nics=cluster.nics)
