"""Model descriptions to layers with FLOPs and bytes: what can be known of a model from its shape alone.

Symbols as in Korthikanti et al. (arXiv 2205.05198): s sequence, h hidden, a heads, f feed-forward width, V vocabulary,
d bytes per element. Everything is per *sample*, a sample being one sequence, so the papers' b (micro-batch) is
multiplied in by the profile.

    embedding -> block.0 -> block.1 -> ... -> block.L-1 -> norm -> head

Embedding, norm and head are layers of their own: they are what makes stages of equal block counts unequal.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from gpipe_sim.catalog import DType
from gpipe_sim.scenario import Optimizer, Transformer

DTYPE_BYTES: dict[DType, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class BytesPerParameter(NamedTuple):
    """What one parameter costs in memory."""

    weight: int
    gradient: int
    optimizer: int


_STATES: dict[Optimizer, int] = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adam": 2}


def bytes_per_parameter(optimizer: Optimizer, dtype: DType) -> BytesPerParameter:
    """Weights, gradients and optimizer state, in bytes per parameter.

                 fp32 (fp64: twice as many)       bf16, fp16 (mixed precision)
        sgd          4 + 4 + 0                        2 + 2 + 4
        momentum     4 + 4 + 4                        2 + 2 + 8
        rmsprop      4 + 4 + 4                        2 + 2 + 8
        adam         4 + 4 + 8                        2 + 2 + 12

    Mixed precision keeps an fp32 master copy of the weights among the optimizer's state, as in Rajbhandari et al.,
    ZeRO (arXiv 1910.02054), section 3.1: 16 bytes per parameter for Adam. RMSProp's 12 are those of GPipe's Table 1.
    """
    word = DTYPE_BYTES[dtype]
    if word >= 4:
        return BytesPerParameter(word, word, word * _STATES[optimizer])
    return BytesPerParameter(word, word, 4 + 4 * _STATES[optimizer])


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer as its shape describes it, per sample."""

    name: str
    parameters: int
    """How many, not bytes."""
    flops: float
    """Of a forward; a backward takes twice as many."""
    saved_bytes: float
    """What remains after a forward with gradients: saved tensors and the output, the input not counted."""
    output_bytes: float
    workspace_bytes: float
    """The largest intermediate values alive together inside the layer, beyond what remains."""
    kernels: int
    """Kernel launches of a forward; a backward makes twice as many."""
    reads_all_weights: bool = True
    """Whether a forward reads every weight; a lookup does not."""


def transformer_layers(model: Transformer, dtype: DType) -> list[Layer]:
    """Embedding, blocks, final norm and head of a decoder-only transformer.

    Parameters: a block has 4h^2 + 2hf weights and 9h + f biases and gains, 12h^2 + 13h when f = 4h (Narayanan et al.,
    arXiv 2104.04473, section 5.1); embedding and head have Vh each, untied; positions are not learned.

    FLOPs of a block's forward: 8sh^2 in the four projections, 4s^2h in scores and weighted sum, 4shf in the
    feed-forward; 24sh^2 + 4s^2h when f = 4h. The head takes 2shV.

    Saved bytes of a block (Korthikanti et al., section 4): attention (5d+1)sh and, with classic attention, (2d+1)as^2
    for softmax output, dropout mask and dropout output; feed-forward dsh + 2dsf + sh; norms 2dsh. With d = 2 and
    f = 4h that is sh(34 + 5as/h). Flash attention recomputes the quadratic part; its row statistics are neglected.
    The input of the first norm is the previous layer's output, the output stands in for it: each storage once.
    The embedding saves (d+1)sh, its output and a dropout mask, the final norm dsh, and the head its logits in at least
    fp32 for the loss, max(4, d)sV (Korthikanti et al., section 4.3).
    """
    s, h, a, f, V = model.sequence, model.hidden, model.heads, model.ffn_width, model.vocab
    d = DTYPE_BYTES[dtype]
    quadratic = a * s * s if model.attention == "classic" else 0
    block = Layer(
        name="block",
        parameters=4 * h * h + 2 * h * f + 9 * h + f,
        flops=8 * s * h * h + 4 * s * s * h + 4 * s * h * f,
        saved_bytes=s * h * (8 * d + 2) + 2 * d * s * f + quadratic * (2 * d + 1),
        output_bytes=d * s * h,
        workspace_bytes=max(2 * d * s * f, 3 * d * s * h + 2 * d * quadratic),
        kernels=16 if model.attention == "classic" else 12,
    )
    embedding = Layer(
        name="embedding",
        parameters=V * h,
        flops=0,
        saved_bytes=s * h * (d + 1),  # the output, and a dropout mask
        output_bytes=d * s * h,
        workspace_bytes=d * s * h,
        kernels=2,
        reads_all_weights=False,
    )
    norm = Layer(
        name="norm",
        parameters=2 * h,
        flops=0,
        saved_bytes=d * s * h,
        output_bytes=d * s * h,
        workspace_bytes=0,
        kernels=1,
    )
    head = Layer(
        name="head",
        parameters=V * h,
        flops=2 * s * h * V,
        saved_bytes=max(4, d) * s * V,  # logits in at least fp32 for the loss (Korthikanti et al., section 4.3)
        output_bytes=d * s * V,
        workspace_bytes=d * s * V,
        kernels=3,
    )
    blocks = [replace(block, name=f"block.{index}") for index in range(model.layers)]
    return [embedding, *blocks, norm, head]
