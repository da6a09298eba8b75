"""Fine-tune a model of Hugging Face's transformers on a text file of your own, as a pipeline.

    torchrun --standalone --nproc-per-node 2 examples/finetune.py --model FOLDER --text mine.txt --out tuned

FOLDER is what `save_pretrained` writes, with its tokenizer; one without a tokenizer is trained on bytes, for which its
vocabulary must have at least 256 tokens. `from_pretrained` reads the result. Each process is one stage.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpipe_exec import Pipeline, leave, split_huggingface, token_loss
from gpipe_exec.devices.accelerator import default_device
from gpipe_exec.devices.groups import start_processes
from gpipe_sim import Plan, load_scenario, make_plan

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def main() -> None:
    """Set up, train, save."""
    arguments = parse_arguments()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, local_files_only=True)
    tokens = tokens_of(arguments)
    start_processes(default_device(), timedelta(minutes=10))
    torch.manual_seed(0)
    sample = next(batches(tokens, arguments))[0]
    layers = split_huggingface(model, {key: value[:2] for key, value in sample.items()})
    pipe = Pipeline(layers, plan_for(len(layers), arguments.batch, dist.get_world_size()), token_loss)
    optimizer = torch.optim.AdamW([{"params": pipe.parameters()}], lr=arguments.lr)
    for epoch in range(arguments.epochs):
        for inputs, targets in batches(tokens, arguments):
            loss = pipe.step(inputs, targets)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if pipe.rank == 0:
            print(f"epoch {epoch + 1}/{arguments.epochs}   loss {float(loss):.4f}", flush=True)
    state = pipe.state_dict()
    if pipe.rank == 0:
        model.load_state_dict(state)
        model.save_pretrained(arguments.out)
        print(f"saved {arguments.out}", flush=True)
    pipe.close()
    dist.destroy_process_group()
    leave()


def parse_arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder as save_pretrained writes it")
    parser.add_argument("--text", type=Path, required=True, help="the text to train on")
    parser.add_argument("--out", type=Path, required=True, help="the folder to save to")
    parser.add_argument("--epochs", type=int, default=1, help="how often to read the text (1)")
    parser.add_argument("--batch", type=int, default=16, help="samples in a step (16)")
    parser.add_argument("--sequence", type=int, default=64, help="tokens in a sample (64)")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate (0.001)")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 2 examples/finetune.py ...")
    return arguments


def tokens_of(arguments: argparse.Namespace) -> torch.Tensor:
    """The text in a row of tokens."""
    text = arguments.text.read_text(encoding="utf-8")
    if any(arguments.model.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
        tokens = torch.tensor(tokenizer(text)["input_ids"])
    else:
        tokens = torch.tensor(list(text.encode()))
    if len(tokens) < 2:
        sys.exit(f"finetune.py: error: {arguments.text} has {len(tokens)} tokens, expected at least 2")
    return tokens


def batches(tokens: torch.Tensor, arguments: argparse.Namespace) -> Iterator[Batch]:
    """Samples from the first token to the last; what the last one lacks is padded, and the last batch is smaller."""
    length = arguments.sequence
    samples = -(-(len(tokens) - 1) // length)
    rows = torch.zeros(samples, length + 1, dtype=torch.long)
    there = torch.zeros(samples, length, dtype=torch.bool)
    for row in range(samples):
        piece = tokens[row * length : (row + 1) * length + 1]
        rows[row, : len(piece)] = piece
        there[row, : len(piece) - 1] = True
    targets = rows[:, 1:].masked_fill(~there, -100)
    for some in torch.arange(samples).split(arguments.batch):
        inputs = {"input_ids": rows[some, :-1].contiguous(), "attention_mask": there[some].long()}
        yield inputs, targets[some].contiguous()


def plan_for(num_layers: int, batch: int, num_stages: int) -> Plan:
    """Equal layers; `gpipe profile` and `gpipe plan` find a better cut (kind: huggingface)."""
    scenario = {
        "name": "finetune",
        "model": {"kind": "layers", "layers": [{"name": "layer", "repeat": num_layers, "forward": "1 ms"}]},
        "batch": batch,
        "dtype": "fp32",
        "cluster": {"device": {"memory": "16 GiB"}, "link": {"bandwidth": "3 GB/s", "latency": "100 us"}},
        "plan": {"stages": num_stages, "microbatches": min(4, batch), "schedule": "1f1b"},
    }
    return make_plan(load_scenario(scenario)[0])


if __name__ == "__main__":
    main()
