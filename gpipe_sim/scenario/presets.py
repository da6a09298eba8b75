"""Transformers by name: the shapes that were published, and how many parameters they were said to have.

A preset is what a scenario's ``model:`` would say in full; whatever the scenario says beside ``preset`` comes first. A
sample has as many tokens as the model was trained with (``sequence``), unless the scenario says otherwise.

Where a count was published to the last digit, or follows from published weights, it is exact. A paper that rounds, as
GPT-3's does, is said to do so by its own digits.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published model."""

    name: str
    shape: Mapping[str, object]
    """Fields of a transformer's section."""
    parameters: float
    """As published."""
    rounding: float = 0.0
    """Half of the last published digit's place; 0 where every parameter was counted."""
    source: str


def _gpt(
    name: str, layers: int, hidden: int, heads: int, context: int, parameters: float, source: str, **more: float
) -> Preset:
    """GPT-2 and GPT-3: learned positions, norms with biases, the head's weights are the embedding's."""
    shape: dict[str, object] = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": 50257}
    shape |= {"sequence": context, "context": context, "positions": "learned", "tied": True}
    return Preset(name=name, shape=MappingProxyType(shape), parameters=parameters, source=source, **more)


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    sequence: int,
    parameters: int,
    source: str,
    **more: object,
) -> Preset:
    """Llama and what followed it: rotary positions, RMS norms, gated feed-forwards, no biases, no dropout."""
    shape: dict[str, object] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    shape |= {"vocab": vocab, "sequence": sequence, "positions": "rotary", "norm": "rms", "gated": True, **more}
    return Preset(name=name, shape=MappingProxyType(shape), parameters=parameters, source=source)


def _qwen(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, parameters: int) -> Preset:
    """Qwen2.5: as Llama, with biases on queries, keys and values; the small ones share embedding and head."""
    small = hidden < 3584
    vocab = 151936 if small else 152064
    return _llama(name, layers, hidden, heads, kv_heads, ffn, vocab, 4096, parameters, _QWEN, bias="qkv", tied=small)


_GPT2 = "Radford et al., 2019, Table 2, and the released configuration and weights"
_GPT3 = "Brown et al., arXiv 2005.14165, Table 2.1, which rounds"
_LLAMA1 = "LLaMA, arXiv 2302.13971, Table 2, and the released configuration and weights"
_LLAMA2 = "Llama 2, arXiv 2307.09288, and the released configuration and weights"
_LLAMA3 = "Llama 3, arXiv 2407.21783, Table 3, and the released configuration and weights"
_LLAMA32 = "Llama 3.2, the released configuration and weights"
_MISTRAL = "Mistral 7B, arXiv 2310.06825, Table 1, and the released configuration and weights"
_NEMO = "Mistral Nemo 2407, the released configuration and weights"
_LARGE = "Mistral Large 2407, the released configuration and weights"
_GEMMA = "Gemma, arXiv 2403.08295, Table 1, and the released configuration and weights"
_QWEN = "Qwen2.5, arXiv 2412.15115, Table 1, and the released configuration and weights"

_PRESETS = [
    # name, layers, hidden, heads, tokens of context, parameters
    _gpt("gpt2", 12, 768, 12, 1024, 124_439_808, _GPT2),
    _gpt("gpt2-medium", 24, 1024, 16, 1024, 354_823_168, _GPT2),
    _gpt("gpt2-large", 36, 1280, 20, 1024, 774_030_080, _GPT2),
    _gpt("gpt2-xl", 48, 1600, 25, 1024, 1_557_611_200, _GPT2),
    _gpt("gpt3-6.7b", 32, 4096, 32, 2048, 6.7e9, _GPT3, rounding=0.05e9),
    _gpt("gpt3-175b", 96, 12288, 96, 2048, 175e9, _GPT3, rounding=0.5e9),
    # name, layers, hidden, heads, heads of keys and values, feed-forward, vocabulary, tokens of a sample, parameters
    _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000, 2048, 6_738_415_616, _LLAMA1),
    _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000, 2048, 13_015_864_320, _LLAMA1),
    _llama("llama-65b", 80, 8192, 64, 64, 22016, 32000, 2048, 65_285_660_672, _LLAMA1),
    _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096, 6_738_415_616, _LLAMA2),
    _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096, 13_015_864_320, _LLAMA2),
    _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096, 68_976_648_192, _LLAMA2),
    _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, 8_030_261_248, _LLAMA3),
    _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, 70_553_706_496, _LLAMA3),
    _llama("llama-3-405b", 126, 16384, 128, 8, 53248, 128256, 8192, 405_853_388_800, _LLAMA3),
    _llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 8192, 1_235_814_400, _LLAMA32, tied=True),
    _llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, 8192, 3_212_749_824, _LLAMA32, tied=True),
    _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000, 8192, 7_241_732_096, _MISTRAL),
    _llama("mistral-nemo-12b", 40, 5120, 32, 8, 14336, 131072, 8192, 12_247_782_400, _NEMO, head_width=128),
    _llama("mistral-large-123b", 88, 12288, 96, 8, 28672, 32768, 8192, 122_610_069_504, _LARGE),
    _llama("gemma-2b", 18, 2048, 8, 1, 16384, 256000, 8192, 2_506_172_416, _GEMMA, tied=True),
    _llama("gemma-7b", 28, 3072, 16, 16, 24576, 256000, 8192, 8_537_680_896, _GEMMA, head_width=256, tied=True),
    # name, layers, hidden, heads, heads of keys and values, feed-forward, parameters
    _qwen("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 494_032_768),
    _qwen("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 1_543_714_304),
    _qwen("qwen2.5-3b", 36, 2048, 16, 2, 11008, 3_085_938_688),
    _qwen("qwen2.5-7b", 28, 3584, 28, 4, 18944, 7_615_616_512),
    _qwen("qwen2.5-14b", 48, 5120, 40, 8, 13824, 14_770_033_664),
    _qwen("qwen2.5-32b", 64, 5120, 40, 8, 27648, 32_763_876_352),
    _qwen("qwen2.5-72b", 80, 8192, 64, 8, 29568, 72_706_203_648),
]

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _PRESETS})


def find_preset(name: str) -> Preset | None:
    """The preset of that name, however it is spelt: ``Llama-2-13B`` and ``llama2_13b`` are the same model.

    Llama 3.1 has the shapes of Llama 3.
    """
    return _SPELT.get(_letters(name.lower().replace("llama-3.1", "llama-3")))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_SPELT = {_letters(name): preset for name, preset in PRESETS.items()}
