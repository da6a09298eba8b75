"""A Hugging Face ``config.json`` as a transformer of a scenario, or the reasons why it is none.

Only what changes costs is read. What cannot be said of a transformer here (experts, windows, norms inside attention) is
refused, and what the file leaves open is taken from the architecture's own default, and told.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpipe_sim.base.files import Document, InputError, Problem, read_yaml
from gpipe_sim.base.limits import shown

SEQUENCE = 4096
"""Tokens in a sample at most, where a configuration says only how many the model can read."""
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class Imported:
    """What a configuration says, in a scenario's words."""

    architecture: str
    model: Mapping[str, Any]
    """The fields of the section ``model``."""
    dtype: str
    assumed: tuple[str, ...]
    """What the configuration leaves open, and what was taken."""


@dataclass
class _Config:
    """A configuration that is being read: what is wrong with it and what was assumed is gathered on the way."""

    document: Document
    problems: list[Problem] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def refuse(self, key: str, expected: str) -> None:
        found = shown(self.document.data[key]) if key in self.document.data else "nothing"
        self.problems.append(self.document.problem((key,), f"found {found}, expected {expected}"))

    def get(self, key: str, default: Any) -> Any:
        """A value that has no bearing on sizes, or the architecture's default where it is left out."""
        value = self.document.data.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A size. One that is left out and has a default is told."""
        value = self.document.data.get(key)
        if value is None and default is not None:
            self.assumed.append(f"{key} is {default}, as it is where a configuration does not say")
            return default
        if type(value) is not int or value < 1:
            self.refuse(key, "a whole number of at least 1")
            return 1
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
            return default
        return value

    def must_be(self, key: str, *allowed: Any, why: str) -> None:
        """Refuse what a transformer of a scenario cannot be; left out is fine."""
        if self.get(key, allowed[0]) not in allowed:
            self.refuse(key, f"{' or '.join(str(one).lower() for one in allowed)}: {why}")

    def drops(self, *keys: str) -> bool:
        rates = [self.get(key, 0.1 if key in _GPT2_DROPOUT else 0.0) for key in keys]
        return any(isinstance(rate, float | int) and rate > 0 for rate in rates)


_GPT2_DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def _sizes(config: _Config, hidden: str, layers: str, heads: str) -> dict[str, Any]:
    sizes = {"layers": config.count(layers), "hidden": config.count(hidden), "heads": config.count(heads)}
    width = config.get("head_dim", None)
    if width is not None:
        sizes["head_width"] = config.count("head_dim")
    elif sizes["hidden"] % sizes["heads"]:
        config.refuse(heads, f"a divisor of {hidden}, {sizes['hidden']}, or head_dim")
    return sizes


def _gpt2(config: _Config) -> dict[str, Any]:
    model = _sizes(config, "n_embd", "n_layer", "n_head")
    config.must_be("add_cross_attention", False, why="a decoder alone")
    context = config.count("n_positions", 1024)
    model |= {"ffn": config.get("n_inner", 4 * model["hidden"]), "vocab": config.count("vocab_size", 50257)}
    model |= {"positions": "learned", "context": context, "norm": "layer", "bias": "all"}
    model |= {"dropout": config.drops(*_GPT2_DROPOUT), "tied": config.flag("tie_word_embeddings", True)}
    return model | {"sequence": min(context, SEQUENCE)}


def _gpt_neox(config: _Config) -> dict[str, Any]:
    model = _sizes(config, "hidden_size", "num_hidden_layers", "num_attention_heads")
    config.must_be("attention_bias", True, why="biases on every product or on none")
    if config.flag("use_parallel_residual", True):
        config.assumed.append(
            "attention and feed-forward, which stand side by side, cost what one after the other costs"
        )
    model |= {"ffn": config.count("intermediate_size"), "vocab": config.count("vocab_size"), "positions": "rotary"}
    model |= {"norm": "layer", "bias": "all", "dropout": config.drops("attention_dropout", "hidden_dropout")}
    model |= {"tied": config.flag("tie_word_embeddings", False)}
    return model | {"sequence": min(config.count("max_position_embeddings", 2048), SEQUENCE)}


def _llama(config: _Config, *, bias: str | None = None, tied: bool = False) -> dict[str, Any]:
    """Llama and what followed it: RMS norms, rotary positions, gated feed-forwards."""
    model = _sizes(config, "hidden_size", "num_hidden_layers", "num_attention_heads")
    model["kv_heads"] = config.count("num_key_value_heads", model["heads"])
    if model["heads"] % model["kv_heads"]:
        config.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {model['heads']}")
    attention, feed_forward = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    if attention != feed_forward:
        config.refuse("attention_bias" if attention else "mlp_bias", "biases on every product or on none")
    model |= {"ffn": config.count("intermediate_size"), "gated": True, "norm": "rms", "positions": "rotary"}
    model |= {"bias": bias or ("all" if attention else "none"), "vocab": config.count("vocab_size")}
    model |= {"dropout": config.drops("attention_dropout"), "tied": config.flag("tie_word_embeddings", tied)}
    return model | {"sequence": min(config.count("max_position_embeddings"), SEQUENCE)}


def _mistral(config: _Config) -> dict[str, Any]:
    return _within_window(config, _llama(config))


def _qwen2(config: _Config) -> dict[str, Any]:
    model = _llama(config, bias="qkv")
    return _within_window(config, model) if config.flag("use_sliding_window", False) else model


def _gemma(config: _Config) -> dict[str, Any]:
    return _llama(config, tied=True)


def _within_window(config: _Config, model: dict[str, Any]) -> dict[str, Any]:
    """Attention within a window is that of all tokens as long as a sample is no longer than the window."""
    window = config.get("sliding_window", None)
    if window is not None and config.count("sliding_window") < model["sequence"]:
        model["sequence"] = config.count("sliding_window")
        config.assumed.append(f"samples are no longer than the window of attention, {window} tokens")
    return model


ARCHITECTURES: Mapping[str, Callable[[_Config], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _mistral,
        "qwen2": _qwen2,
        "gemma": _gemma,
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
    }
)
"""By ``model_type``."""


def read_config(path: Path) -> Imported:
    """A ``config.json``, which is YAML too, and so knows its lines; all that is wrong with it at once."""
    document = read_yaml(path)
    if not isinstance(document.data, dict):
        raise InputError([document.problem((), "expected a mapping with model_type, as Hugging Face writes it")])
    config = _Config(document, list(document.problems))
    kind = document.data.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        config.refuse("model_type", f"one of {', '.join(ARCHITECTURES)}")
        raise InputError(config.problems)
    model = ARCHITECTURES[kind](config)
    if config.get("quantization_config", None) is not None:
        config.refuse("quantization_config", "none: weights that are trained are numbers of one dtype")
    name = config.get("dtype", config.get("torch_dtype", None))
    if name is None:
        config.assumed.append("dtype is bf16, as nothing is said of it")
    elif name not in _DTYPES:
        config.refuse("dtype" if "dtype" in document.data else "torch_dtype", f"one of {', '.join(_DTYPES)}")
    if config.problems:
        raise InputError(config.problems)
    limit = config.get("max_position_embeddings", config.get("n_positions", model["sequence"]))
    config.assumed.append(
        f"a sample has {model['sequence']} tokens; the model can read {limit}, and a configuration says no more of it"
    )
    if model["dropout"]:
        config.assumed.append("masks of dropout are kept wherever a transformer has them")
    return Imported(kind, {"kind": "transformer", **model}, _DTYPES.get(name, "bf16"), tuple(config.assumed))
