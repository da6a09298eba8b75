"""A scenario to begin with: by name, as a dict, from `gpipe init` or a Hugging Face configuration; and completion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run

from gpipe_sim import InputError, load_profile, load_scenario, make_plan, predict
from gpipe_sim.cost.transformer import num_parameters
from gpipe_sim.scenario.huggingface import read_config
from gpipe_sim.scenario.reading import shipped_scenarios

SMALL = {
    "name": "small",
    "model": {"kind": "layers", "layers": ({"name": "layer", "repeat": 4, "forward": "1 ms", "backward": "2 ms"},)},
    "batch": 8,
    "cluster": {"device": "a100-80gb", "link": {"bandwidth": "inf GB/s"}},
    "plan": {"stages": 4, "microbatches": 4, "checkpoint": "never"},
}

# What Hugging Face's own files say, as far as sizes go, and how many parameters the published weights have.
PUBLISHED = {
    "gpt2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, 124_439_808),
    "llama-3.2-1b": (
        {
            "model_type": "llama",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        1_235_814_400,
    ),
    "mistral-7b": (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
        7_241_732_096,
    ),
    "qwen2.5-7b": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
            "use_sliding_window": False,
            "sliding_window": 100,
        },
        7_615_616_512,
    ),
    "gemma-2b": (
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 16384,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
        },
        2_506_172_416,
    ),
    "pythia-70m": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "intermediate_size": 2048,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
        },
        70_426_624,
    ),
}


def write_config(folder: Path, config: dict) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=2))
    return path


def test_a_shipped_scenario_goes_by_its_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bubble").mkdir()  # a folder is no scenario
    by_name = run(capsys, "simulate", "bubble", "--json")
    assert by_name == run(capsys, "simulate", shipped_scenarios() / "bubble.yaml", "--json")
    assert by_name[0] == 0
    assert len(load_scenario("bubble")) == 7


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bubble").write_text(json.dumps(SMALL))
    assert load_scenario("bubble").name == "small"


@pytest.mark.parametrize(
    "command", [["simulate"], ["plan"], ["campaign"], ["profile"], ["run"], ["export", "--to", "csv"]]
)
def test_a_name_that_is_misspelt_gets_the_right_one(capsys, command):
    status, _, err = run(capsys, *command, "buble")
    assert status == 2
    assert "buble: there is no such file, nor a scenario of that name" in err
    assert "did you mean 'bubble'?" in err
    assert "expected one of bandwidth_wall, bubble, checkpoint" in run(capsys, *command, "xyz")[2]
    assert "No such file" in run(capsys, *command, "bubble.yaml")[2]  # a file that is not there is not ours


def test_a_dict_is_a_scenario():
    prediction = predict(SMALL)
    assert prediction.step_time_s == pytest.approx(7 * 6e-3)
    assert (
        predict(load_scenario(SMALL)[0]).step_time_s == prediction.step_time_s == predict(prediction.plan).step_time_s
    )
    assert len(load_scenario(SMALL, "plan.microbatches=[1, 2]")) == 2


def test_mistakes_of_a_dict_are_told_by_their_fields():
    with pytest.raises(InputError) as wrong:
        load_scenario({**SMALL, "batch": "many", "plan": {"stags": 4}})
    assert [str(problem) for problem in wrong.value.problems][:2] == [
        "scenario: batch: found 'many', expected a whole number",
        "scenario: plan.stags: unknown key, did you mean 'stages'?",
    ]
    with pytest.raises(InputError, match="expected numbers, text"):
        load_scenario({**SMALL, "batch": object()})
    with pytest.raises(InputError, match="has 2 plans, expected a single one"):
        predict({**SMALL, "plan": {**SMALL["plan"], "microbatches": [2, 4]}})


def test_the_main_objects_say_what_they_are_in_one_line(tmp_path):
    prediction = predict(SMALL)
    plan = prediction.plan
    (tmp_path / "profile.json").write_text(plan.profile.to_json())
    assert repr(load_scenario("bubble")) == "Sweep('bubble', 7 points)"
    assert repr(plan.scenario) == "Scenario('small': layers, batch 8, a100-80gb)"
    assert repr(plan) == "Plan('small': 4 stages, 4 micro-batches, gpipe, checkpoint never)"
    assert repr(prediction) == "Prediction('small': 42.0 ms, bubble 42.9%, peak memory 0 B, fits)"
    assert repr(load_profile(tmp_path / "profile.json")) == repr(plan.profile)
    assert repr(prediction.step) == "Step(4 ranks, 36 actions, 42.0 ms)"
    for value in (plan.profile, prediction.step.ranks[0], prediction.step.memory[0], prediction.step.program):
        assert "\n" not in repr(value)
        assert len(repr(value)) < 120
    swept = predict(load_scenario("interleaved", "plan.microbatches=8")[0]).plan
    assert "on 4 ranks" in repr(swept) or swept.num_ranks == swept.num_stages


# --- gpipe init ----------------------------------------------------------------------------------------------------


def test_init_writes_a_scenario_that_can_be_simulated_and_replaces_none(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "init")[0] == 0
    sweep = load_scenario("scenario.yaml")
    assert len(sweep) == 18
    assert predict(make_plan(sweep[-1])).fits
    status, _, err = run(capsys, "init")
    assert (status, "scenario.yaml, which is there already" in err) == (2, True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_has_the_published_number_of_parameters(capsys, tmp_path, name):
    config, parameters = PUBLISHED[name]
    out = tmp_path / "my-model.yaml"
    status, _, err = run(capsys, "init", "--from", write_config(tmp_path, config), "--out", out)
    assert status == 0
    assert "assumed: a sample has" in err
    scenario = load_scenario(out)[0]
    assert num_parameters(scenario.model) == parameters
    assert scenario.name == "my-model"
    assert scenario.dtype == {"float16": "fp16"}.get(config.get("torch_dtype"), "bf16")
    assert "# Assumed: " in out.read_text()


def test_what_a_configuration_leaves_open_is_told(tmp_path):
    imported = read_config(write_config(tmp_path, PUBLISHED["gpt2"][0]))
    assert "n_positions is 1024, as it is where a configuration does not say" in imported.assumed
    assert "dtype is bf16, as nothing is said of it" in imported.assumed
    assert (imported.model["tied"], imported.model["dropout"]) == (True, True)
    undropped = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    assert not read_config(write_config(tmp_path, PUBLISHED["gpt2"][0] | undropped)).model["dropout"]
    short = read_config(write_config(tmp_path, PUBLISHED["mistral-7b"][0] | {"sliding_window": 1024}))
    assert short.model["sequence"] == 1024


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"model_type": "mixtral"},
            "config.json:2: model_type: found 'mixtral', expected one of llama, mistral, qwen2",
        ),
        ({"hidden_size": "wide"}, "config.json:3: hidden_size: found 'wide', expected a whole number of at least 1"),
        ({"num_hidden_layers": None}, "num_hidden_layers: found nothing, expected a whole number"),
        ({"attention_bias": True}, "attention_bias: found true, expected biases on every product or on none"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: found 5, expected a divisor of num_attention_heads, 32"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: found {'bits': 4}, expected none"),
        ({"torch_dtype": "int8"}, "torch_dtype: found 'int8', expected one of bfloat16"),
        (
            {"head_dim": None, "num_attention_heads": 33},
            "num_attention_heads: found 33, expected a divisor of hidden_size",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: found 1, expected true or false"),
    ],
)
def test_what_cannot_be_expressed_is_refused_at_its_line(capsys, tmp_path, changes, told):
    config = write_config(tmp_path, PUBLISHED["llama-3.2-1b"][0] | changes)
    status, _, err = run(capsys, "init", "--from", config, "--out", tmp_path / "new.yaml")
    assert status == 2
    assert told in err
    assert not (tmp_path / "new.yaml").exists()


# --- completion ----------------------------------------------------------------------------------------------------


def ask(folder: Path, **asked: str) -> str:
    """What the command says to a shell that asks it."""
    command = [sys.executable, "-c", "from gpipe_sim.cli import main; main()"]
    return subprocess.run(command, env=os.environ | asked, cwd=folder, capture_output=True, text=True).stdout


def completed(words: str, folder: Path) -> list[str]:
    """What bash would offer at the end of these words."""
    last = str(len(words.split(" ")) - 1)
    return ask(folder, _GPIPE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=last).split()


def test_the_shell_completes_commands_and_scenarios(tmp_path):
    (tmp_path / "bubbles.yaml").touch()
    (tmp_path / "bubble.png").touch()
    assert completed("gpipe si", tmp_path) == ["simulate"]
    assert completed("gpipe simulate bub", tmp_path) == ["bubble", "bubbles.yaml"]
    assert "_GPIPE_COMPLETE=complete_bash" in ask(tmp_path, _GPIPE_COMPLETE="source_bash")
