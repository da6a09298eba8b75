"""Under torchrun: Hugging Face's models in stages, with the losses and gradients of the whole, in float64."""

import os
import tempfile

import torch
import torch.distributed as dist
import transformers
from huggingface_models import CONFIGS, asked, made
from workers.modules import BATCH, close, plan_for

from gpipe_exec import Pipeline, leave, split_huggingface, token_loss


def check(name: str, **choices) -> None:
    inputs, targets = asked(name, BATCH)
    whole, model = made(name), made(name)
    total, count = token_loss(whole(**inputs).logits, targets)
    # Divided afterwards, as a pipeline does: Hugging Face's norms round to float32, of which a factor is a part that is
    # no power of two.
    total.backward()
    for parameter in whole.parameters():
        parameter.grad /= count
    layers = split_huggingface(model, inputs)
    pipe = Pipeline(layers, plan_for(layers, **choices), token_loss)
    close(pipe.step(inputs, targets), total.detach() / count, f"loss of {name}")
    close(pipe.evaluate(inputs, targets), total.detach() / count, f"evaluation of {name}")
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for key, parameter in pipe.named_parameters():
        if name in SUMS_IN_FLOAT32:
            torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-5, atol=1e-8)
        else:
            close(parameter.grad, expected[key].grad, f"gradient of {key} of {name}")
    state = pipe.state_dict()
    if pipe.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            model.load_state_dict(state)
            model.save_pretrained(folder)
            again = type(model).from_pretrained(folder, dtype=torch.float64)
        for key, tensor in whole.state_dict().items():
            close(again.state_dict()[key], tensor, f"{key} of {name}, saved and read again")
    pipe.close()


SUMS_IN_FLOAT32 = {"gemma2"}
"""Their norms sum gradients of weights in float32 whatever the dtype, so that another order rounds otherwise."""


def main() -> None:
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for number, name in enumerate(CONFIGS):
        check(
            name, schedule=("gpipe", "1f1b", "zb_h1")[number % 3], checkpoint=("always", "never", "never")[number % 3]
        )
    dist.barrier()
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print("models are exact")
    leave()


if __name__ == "__main__":
    main()
