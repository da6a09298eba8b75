"""Hugging Face's architectures, tiny, from their configurations."""

import torch
import transformers

_SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 32,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 4, "vocab_size": 50, "n_positions": 32, "bos_token_id": 1}
_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 50}
_BART = {
    **{f"{half}_layers": 2 for half in ("encoder", "decoder")},
    **{f"{half}_attention_heads": 4 for half in ("encoder", "decoder")},
    **{f"{half}_ffn_dim": 32 for half in ("encoder", "decoder")},
    "d_model": 16,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "dropout": 0.0,
}
CONFIGS = {
    "gpt2": GPT2 | {"eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": _GROUPED | {"tie_word_embeddings": True},
    "mistral": _GROUPED | {"sliding_window": 4},
    "mixtral": _GROUPED | {"num_local_experts": 4},
    "qwen3": _GROUPED,
    "gemma2": _GROUPED | {"head_dim": 4, "query_pre_attn_scalar": 4},
    "t5": _T5 | {"dropout_rate": 0.0},
    "bart": _BART,
    "bert": _SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
HEADS = {"bert": "masked_lm", "t5": "seq2seq_lm", "bart": "seq2seq_lm"}
LAYERS = {"bert": 5, "t5": 12, "bart": 7}
"""6 in the others: embedding, 3 blocks, norm and head. T5's encoder and decoder have a norm and a dropout each."""
AUTO = {
    "causal_lm": transformers.AutoModelForCausalLM,
    "masked_lm": transformers.AutoModelForMaskedLM,
    "seq2seq_lm": transformers.AutoModelForSeq2SeqLM,
}


def made(name: str) -> torch.nn.Module:
    """In float64, with reproducible weights; experts one by one, as Hugging Face computes them in that dtype."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
    auto = AUTO[HEADS.get(name, "causal_lm")]
    more = {"experts_implementation": "eager"} if name == "mixtral" else {}
    return auto.from_config(config, **more).double()


def asked(name: str, samples: int, length: int = 8):
    """`padded` texts; where there is a decoder, it is given another text, of another length."""
    inputs, targets = padded(samples, length)
    if HEADS.get(name) != "seq2seq_lm":
        return inputs, targets
    answer, targets = padded(samples, length - 3)
    return inputs | {f"decoder_{key}": tensor for key, tensor in answer.items()}, targets


def padded(samples: int, length: int = 8):
    """Texts of different lengths: what follows the end is masked, and its label is -100."""
    generator = torch.Generator().manual_seed(samples)
    ids = torch.randint(1, 50, (samples, length + 1), generator=generator)
    there = torch.arange(length) < torch.randint(2, length + 1, (samples, 1), generator=generator)
    inputs = {"input_ids": ids[:, :-1].contiguous(), "attention_mask": there.long()}
    return inputs, ids[:, 1:].masked_fill(~there, -100)
