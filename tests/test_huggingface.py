"""Hugging Face's models: split, and run as stages with the gradients of the whole (`make huggingface`)."""

import json
from pathlib import Path

import pytest
from commands import run
from processes import run_ranks, torchrun

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")
transformers = pytest.importorskip("transformers", reason="needs transformers: make huggingface")

from huggingface_models import CONFIGS, GPT2, HEADS, LAYERS, asked, made, padded  # noqa: E402

from gpipe_exec import split_huggingface, token_loss  # noqa: E402
from gpipe_exec.layers import WorkloadError, build_workload  # noqa: E402
from gpipe_exec.modules.splitting import SplitError  # noqa: E402
from gpipe_sim.scenario.reading import load_scenario  # noqa: E402

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("masked", [True, False])
def test_layers_compute_what_the_model_computes(name, masked):
    inputs, targets = asked(name, 4)
    inputs = inputs if masked else {key: tensor for key, tensor in inputs.items() if not key.endswith("mask")}
    model = made(name)
    layers = split_huggingface(model, inputs)
    assert len(layers) == LAYERS.get(name, 6)
    assert {key.partition(".")[2] for key in layers.state_dict()} == set(model.state_dict())
    token_loss(layers(inputs), targets)[0].backward()
    found = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    token_loss(model(**inputs).logits, targets)[0].backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_mask_that_masks_nothing_may_come_after_one_that_does():
    layers, model = (lambda model: (split_huggingface(model, padded(4)[0]), model))(made("llama"))
    whole = {"input_ids": padded(4)[0]["input_ids"], "attention_mask": torch.ones(4, 8, dtype=torch.long)}
    torch.testing.assert_close(layers(whole), model(**whole).logits)


def test_models_that_do_more_than_call_blocks_and_modules_are_refused():
    class Adding(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + self.model.embed_tokens.weight[0, 0]
            return output

    model = Adding(transformers.LlamaConfig(**CONFIGS["llama"]))
    with pytest.raises(SplitError, match="does not compute the same in layers"):
        split_huggingface(model, {"input_ids": torch.ones(2, 4, dtype=torch.long)})


def test_a_module_that_is_called_before_and_behind_the_blocks_is_in_both_places():
    """T5's dropout, which nobody sees in evaluation mode."""
    inputs, _ = asked("t5", 4)
    layers = split_huggingface(made("t5"), inputs)
    places = [
        index
        for index, layer in enumerate(layers)
        if any(n.endswith("coder.dropout") for n, _ in layer.named_modules())
    ]
    assert [type(layers[index]).__name__ for index in places] == ["_Before", "Dropout", "_Before", "Dropout"]


@pytest.mark.parametrize("num_ranks", [2])
def test_stages_of_a_model_have_the_losses_and_gradients_of_the_whole(num_ranks):
    printed = run_ranks(num_ranks, "huggingface.py")
    assert "models are exact" in printed


def scenario_of(model: dict, **more) -> dict:
    cluster = {"device": "cpu", "link": {"bandwidth": "3 GB/s"}}
    plan = {"stages": 2, "microbatches": 4, "checkpoint": "always"}
    return {"name": "mine", "model": model, "batch": 8, "dtype": "fp32", "cluster": cluster, "plan": plan, **more}


def test_a_model_is_profiled_planned_and_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = made("gpt2").float()
    weights.save_pretrained(tmp_path / "saved")
    config = {"model_type": "gpt2", **CONFIGS["gpt2"]}
    model = {"kind": "huggingface", "config": config, "sequence": 16, "weights": "saved"}
    Path("mine.yaml").write_text(json.dumps(scenario_of(model, profile="profile.json")))
    state = build_workload(load_scenario("mine.yaml")[0]).layers.state_dict()
    assert torch.equal(state["0.transformer.wte.weight"], weights.transformer.wte.weight)
    assert run(capsys, "profile", "mine.yaml", "--device", "cpu")[0] == 0
    status, out, err = run(capsys, "run", "mine.yaml", "--device", "cpu", "--steps", "3", "--json", "--out", "run")
    assert status == 0, err
    compared = json.loads(out)
    assert compared["step_time"]["measured_s"] > 0


def test_an_encoder_and_its_decoder_are_named_in_a_scenario():
    model = {
        "kind": "huggingface",
        "config": {"model_type": "t5", **CONFIGS["t5"]},
        "sequence": 8,
        "head": "seq2seq_lm",
    }
    workload = build_workload(load_scenario(scenario_of(model, profile="profile.json"))[0])
    inputs, targets = workload.sample(2)
    assert set(inputs) == {"input_ids", "decoder_input_ids"}
    assert workload.layers(inputs).shape == (*targets.shape, 50)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"config": {"model_type": "gpt9"}}, "model.config: .*gpt9"),
        ({"config": {"model_type": "gpt2", **GPT2, "n_layers": 3}}, "model.config.n_layers: unknown key, did you mean"),
        ({"config": {"model_type": "gpt2", **GPT2}, "weights": "nowhere"}, "nowhere"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said(changes, told):
    model = {"kind": "huggingface", "sequence": 8, **changes}
    with pytest.raises(WorkloadError, match=told):
        build_workload(load_scenario(scenario_of(model, profile="profile.json"))[0])
    assert set(HEADS) < set(CONFIGS)


def test_the_example_tunes_a_model_on_a_text_and_saves_it(tmp_path):
    config = transformers.GPT2Config(**CONFIGS["gpt2"] | {"vocab_size": 256, "n_positions": 64})
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "mine.txt").write_text("the same again and again, " * 40)
    script = TESTS.parent / "examples" / "finetune.py"
    files = ["--model", tmp_path / "model", "--text", tmp_path / "mine.txt", "--out", tmp_path / "tuned"]
    printed = torchrun(2, script, *files, "--epochs", 3, "--sequence", 24, "--lr", 0.01)
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("epoch")]
    assert len(losses) == 3
    assert losses[-1] < losses[0] < 5.6
    tuned = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "tuned")
    assert tuned.lm_head.weight is tuned.transformer.wte.weight
