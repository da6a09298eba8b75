"""Model descriptions to layers with FLOPs and bytes: what can be known of a model from its shape alone.

Symbols as in Korthikanti et al. (arXiv 2205.05198): s sequence, h hidden, a heads, f feed-forward width, V vocabulary,
d bytes per element. Everything is per *sample*, a sample being one sequence, so the papers' b (micro-batch) is
multiplied in by the profile.

    embedding -> block.0 -> block.1 -> ... -> block.L-1 -> norm -> head

Embedding, norm and head are layers of their own: they are what makes stages of equal block counts unequal.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from gpipe_sim.scenario.catalog import DType
from gpipe_sim.scenario.schema import Optimizer, Precision, Transformer

DTYPE_BYTES: dict[DType, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class BytesPerParameter(NamedTuple):
    """What one parameter costs in memory."""

    weight: int
    gradient: int
    optimizer: int


_STATES: dict[Optimizer, int] = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adam": 2}


def bytes_per_parameter(optimizer: Optimizer, dtype: DType, precision: Precision = "mixed") -> BytesPerParameter:
    """Weights, gradients and optimizer state, in bytes per parameter, while a step is under way.

                 fp32 (fp64: twice as many)       bf16, fp16: mixed        pure
        sgd          4 + 4 + 0                        2 + 2 + 4            2 + 2 + 0
        momentum     4 + 4 + 4                        2 + 2 + 8            2 + 2 + 2
        rmsprop      4 + 4 + 4                        2 + 2 + 8            2 + 2 + 2
        adam         4 + 4 + 8                        2 + 2 + 12           2 + 2 + 4

    Mixed precision has the weights in fp32, counted with the optimizer's state, and copies of them to compute with, as
    in Rajbhandari et al., ZeRO (arXiv 1910.02054), section 3.1: 16 bytes per parameter for Adam. In the update an fp32
    gradient takes the place of the copy and its gradient. RMSProp's 12 are those of GPipe's Table 1. Gradients
    that are added up in fp32 (``mixed_fp32_gradients``) take 4 bytes instead of 2: 18 for Adam, as in Megatron-LM.
    """
    word = DTYPE_BYTES[dtype]
    if word >= 4 or precision == "pure":
        return BytesPerParameter(word, word, word * _STATES[optimizer])
    gradient = 4 if precision == "mixed_fp32_gradients" else word
    return BytesPerParameter(word, gradient, 4 + 4 * _STATES[optimizer])


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
    weights_share: float
    """The part of a backward that makes the gradients of the weights, where it is split."""
    kept_bytes: float
    """What remains between the halves of a backward: of products with weights, input and gradient of the output."""
    attention_flops: float = 0.0
    """Of `flops`, those of scores and weighted sum."""
    attention_bytes: float = 0.0
    """Of `saved_bytes`, those of the quadratic part, which can be made again from queries, keys and values."""


def transformer_layers(model: Transformer, dtype: DType) -> list[Layer]:
    """Embedding, blocks, final norm and head of a decoder-only transformer.

    H is the width of the queries of all heads, G that of the keys: both are h, unless heads share keys and values or
    have a width of their own. g is the number of matrices that enter the feed-forward: 2 if it is gated, else 1.

    Parameters: a block has 2hH + 2hG + (1+g)hf weights; H + 2G + 2h + gf biases, or the first two, or none; and two
    norms of 2h, or of h without biases. That is 12h^2 + 13h in the plainest case, H = G = h, g = 1 and f = 4h
    (Narayanan et al., arXiv 2104.04473, section 5.1). Embedding and head have Vh each, learned positions h for each;
    tied, the head's are the embedding's.

    FLOPs of a block's forward: 4sh(H + G) in the four projections, 4s^2H in scores and weighted sum (if only pairs
    count in which no token sees a later one, 2s(s+1)H), 2(1+g)shf in the feed-forward; 24sh^2 + 4s^2h in the plainest
    case. The head takes 2shV.

    Saved bytes of a block (Korthikanti et al., section 4): attention ds(h + 2H + 2G), for its inputs, queries, keys,
    values and result, and a mask of dropout, sh; with classic attention also (2d+1)as^2 for softmax output, dropout
    mask and dropout output, or das^2 without dropout; feed-forward dsh + (1+g)dsf and a mask, sh (a gate's activation
    is recomputed in the backward, as fused kernels do); norms 2dsh. With d = 2 that is sh(34 + 5as/h) in the plainest
    case. Flash attention recomputes the quadratic part; its row statistics are neglected.
    The input of the first norm is the previous layer's output, the output stands in for it: each storage once.
    The embedding saves (d+1)sh, its output and a dropout mask, the final norm dsh, and the head its logits in at least
    fp32 for the loss, max(4, d)sV (Korthikanti et al., section 4.3).

    A split backward makes the gradients of weights in products apart, those of norms with the inputs'. Of the 2 x FLOPs
    of a block's backward these are those of its products with weights once more. Until then their inputs,
    ds(2h + H + f), and the gradients of their outputs, ds(2h + H + 2G + gf), are kept: 32sh with d = 2 in the plainest
    case, as in Qi et al., Zero Bubble (arXiv 2401.10241), Table 1. A lookup's input has no gradient: all of its
    backward is for the table.
    """
    s, h, a, f, V = model.sequence, model.hidden, model.heads, model.ffn_width, model.vocab
    H, G, g = model.query_width, model.kv_width, 2 if model.gated else 1
    d, mask = DTYPE_BYTES[dtype], 1 if model.drops else 0
    quadratic = a * s * s if model.attention == "classic" else 0
    products = 4 * s * h * (H + G) + 2 * (1 + g) * s * h * f
    scores = 2 * s * (s + 1) * H if model.causal else 4 * s * s * H
    norm_parameters = 2 * h if model.norm == "layer" else h
    biases = {"all": H + 2 * G + 2 * h + g * f, "qkv": H + 2 * G, "none": 0}[model.biases]
    block = Layer(
        name="block",
        parameters=2 * h * (H + G) + (1 + g) * h * f + biases + 2 * norm_parameters,
        flops=products + scores,
        saved_bytes=s * (d * (4 * h + 2 * H + 2 * G + (1 + g) * f) + 2 * mask * h) + quadratic * (d + mask * (d + 1)),
        output_bytes=d * s * h,
        workspace_bytes=max((1 + g) * d * s * f, d * s * (H + 2 * G) + 2 * d * quadratic),
        kernels=(16 if model.attention == "classic" else 12) + 2 * (model.positions == "rotary") + (g - 1),
        weights_share=products / (2 * (products + scores)),
        kept_bytes=d * s * (4 * h + 2 * H + 2 * G + (1 + g) * f),
        attention_flops=scores,
        attention_bytes=quadratic * (d + mask * (d + 1)),
    )
    embedding = Layer(
        name="embedding",
        parameters=(V + model.num_positions) * h,
        flops=0,
        saved_bytes=s * h * (d + mask),  # the output, and a dropout mask
        output_bytes=d * s * h,
        workspace_bytes=d * s * h,
        kernels=2,
        reads_all_weights=False,
        weights_share=1.0,
        kept_bytes=s * h * (d + mask),  # the gradient of the output, and the dropout mask
    )
    norm = Layer(
        name="norm",
        parameters=norm_parameters,
        flops=0,
        saved_bytes=d * s * h,
        output_bytes=d * s * h,
        workspace_bytes=0,
        kernels=1,
        weights_share=0.0,
        kept_bytes=0,
    )
    head = Layer(
        name="head",
        parameters=V * h,
        flops=2 * s * h * V,
        # Logits in at least fp32 for the loss (Korthikanti et al., section 4.3), or their gradients in their place.
        saved_bytes=(d if model.fused_loss else max(4, d)) * s * V,
        output_bytes=0 if model.fused_loss else d * s * V,
        workspace_bytes=0 if model.fused_loss else d * s * V,
        kernels=3,
        weights_share=0.5,
        kept_bytes=d * s * h + d * s * V,
    )
    blocks = [replace(block, name=f"block.{index}") for index in range(model.layers)]
    return [embedding, *blocks, norm, head]


def num_parameters(model: Transformer) -> int:
    """Of the whole model; weights that embedding and head share are counted once."""
    embedding, block, *_, norm, head = transformer_layers(model, "fp32")
    shared = head.parameters if model.tied else 0
    return embedding.parameters + model.layers * block.parameters + norm.parameters + head.parameters - shared


def flops_per_sample(model: Transformer) -> float:
    """Of a forward and a backward without recomputation: three times the forward's."""
    return 3 * sum(layer.flops for layer in transformer_layers(model, "fp32"))
