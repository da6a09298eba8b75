"""The examples, with real processes: a pipeline trains, resumes, and exchanges its state with one process."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plans import scenario

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from gpipe_exec import Pipeline, read_model  # noqa: E402
from gpipe_exec.engine.checkpoint import whole_checkpoints  # noqa: E402
from gpipe_exec.layers import build_workload, load_workload  # noqa: E402
from gpipe_sim.cost.profile import COLUMNS, Profile  # noqa: E402
from gpipe_sim.make.making import make_plan  # noqa: E402
from gpipe_sim.make.planfile import save_plan  # noqa: E402

EXAMPLES = Path(__file__).parents[1] / "examples"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
EXAMPLE = runpy.run_path(str(EXAMPLES / "train.py"))


def command(num_processes, *options):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [sys.executable, *launcher, str(EXAMPLES / "train.py"), *map(str, options)]


def train(num_processes, *options):
    """Run the example under torchrun; return the loss before and after, as its last line tells."""
    done = subprocess.run(
        command(num_processes, *options), env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    last_line = done.stdout.splitlines()[-1]
    *words, before, _, after = last_line.split()
    assert words == ["loss", "fell", "from"], last_line
    return float(before), float(after)


def fails(*options):
    """What one process, started as torchrun would, says on its way out with status 2."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train.py"), *map(str, options)],
        env=ENVIRONMENT | alone,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    return done.stderr


class OneProcess:
    """The example's model as a plain ``nn.Sequential``, with the example's data."""

    def __init__(self):
        plan = EXAMPLE["plan_for"](1)
        self.layers, _, self.loss = workload = build_workload(plan.scenario)
        self.batch = EXAMPLE["batches"](plan, workload)
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=3e-3)

    def train(self, steps):
        for step in steps:
            inputs, targets = self.batch(step)
            self.loss(self.layers(inputs), targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self):
        inputs, targets = self.batch(EXAMPLE["UNSEEN"])
        return float(self.loss(self.layers(inputs), targets))

    def save(self, folder, step, loss_before):
        """As a pipeline of one rank, which has no other part to wait for."""
        pipe = Pipeline(self.layers, EXAMPLE["plan_for"](1), self.loss)
        pipe.save(folder, self.optimizer, step, {"loss_before": loss_before})
        pipe.close()


def last_step(folder):
    return int(whole_checkpoints(folder)[-1].name)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A checkpoint of a run that was interrupted while it trained, with what the run printed, and its errors."""
    path = tmp_path_factory.mktemp("interrupted") / "checkpoints"
    process = subprocess.Popen(
        command(2, "--steps", 1_000_000, "--checkpoint", path),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)  # torchrun passes it on, and itself ends with a traceback of its own
    out, err = process.communicate(timeout=900)
    return path, out, err


@pytest.fixture(scope="module")
def uninterrupted(interrupted, tmp_path_factory):
    """A checkpoint of a run of more steps than the interrupted one, and the loss before and after them."""
    path = tmp_path_factory.mktemp("uninterrupted") / "checkpoints"
    num_steps = max(30, last_step(interrupted[0]) + 10)
    return path, *train(2, "--steps", num_steps, "--checkpoint", path)


def test_two_processes_train_and_the_loss_falls(uninterrupted):
    _, before, after = uninterrupted
    assert after < before / 2


def test_an_interrupt_ends_all_ranks_after_the_same_step_and_saves_it(interrupted):
    path, out, err = interrupted
    assert f"stopped after step {last_step(path)}, start again to go on" in out
    assert "train.py" not in err
    assert [file.name for file in path.parent.iterdir()] == ["checkpoints"]


def test_an_interrupted_run_ends_exactly_where_an_uninterrupted_one_does(interrupted, uninterrupted, tmp_path):
    path, *losses = uninterrupted
    resumed = Path(shutil.copytree(interrupted[0], tmp_path / "checkpoints"))
    assert train(2, "--steps", last_step(path), "--checkpoint", resumed) == tuple(losses)
    assert last_step(resumed) == last_step(path)
    found, expected = read_model(resumed), read_model(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_saved_state_loads_into_one_process_and_gives_the_same_loss(uninterrupted):
    path, before, after = uninterrupted
    whole = OneProcess()
    assert whole.evaluate() == pytest.approx(before, abs=2e-6)
    whole.layers.load_state_dict(read_model(path))
    assert whole.evaluate() == pytest.approx(after, abs=2e-6)


def test_training_that_began_in_one_process_goes_on_in_a_pipeline(tmp_path):
    """Its state and its optimizer's are loaded by two stages, and two more steps there equal two more steps here."""
    whole, path = OneProcess(), tmp_path / "checkpoints"
    before = whole.evaluate()
    whole.train(range(3))
    whole.save(path, step=3, loss_before=before)
    whole.train(range(3, 5))
    _, after = train(2, "--steps", 5, "--checkpoint", path)
    assert after == pytest.approx(whole.evaluate(), rel=1e-5)


# --- the user's own model ------------------------------------------------------------------------------------------


def own_plan(folder, num_layers=5, stages=2, parameter_bytes=1.0):
    """A plan file for examples/own_model.py, its layers equally costly."""
    Profile(
        source="measured",
        device="cpu",
        dtype="fp32",
        names=tuple(f"layer{index}" for index in range(num_layers)),
        sizes=(1,),
        table={column: np.ones((num_layers, 1)) for column in COLUMNS},
        parameter_bytes=np.full(num_layers, float(parameter_bytes)),
        optimizer_s=np.zeros(num_layers),
    ).save(folder / "profile.json")
    data = {
        "name": "own",
        "model": {"kind": "python", "function": "own_model:model"},
        "profile": str(folder / "profile.json"),
        "batch": 10,
        "dtype": "fp32",
        "cluster": {"device": {"memory": "1 GiB"}, "link": {"bandwidth": "1 GB/s", "latency": "0 s"}},
        "plan": {"stages": stages, "microbatches": 3, "checkpoint": "always"},
    }
    save_plan(make_plan(scenario(data)), folder / "plan.yaml")
    return folder / "plan.yaml"


def test_a_model_of_ones_own_trains(tmp_path):
    assert len(load_workload("own_model:model", EXAMPLES).layers) == 5
    before, after = train(2, "--plan", own_plan(tmp_path), "--steps", 30)
    assert after < before / 2


def test_a_plan_of_more_ranks_than_processes_is_planned_again_and_trains(tmp_path):
    before, after = train(1, "--plan", own_plan(tmp_path), "--steps", 30)
    assert after < before / 2


# --- mistakes ------------------------------------------------------------------------------------------------------


def test_a_model_with_another_number_of_layers_than_the_plan_is_an_error(tmp_path):
    plan = own_plan(tmp_path, num_layers=4, stages=1)
    assert "error: the model has 5 layers, but the plan was made for 4" in fails("--plan", plan)


def test_fewer_processes_than_would_fit_are_an_error_that_names_what_would(tmp_path):
    plan = own_plan(tmp_path, parameter_bytes=60 * 2**20)
    (tmp_path / "profile.json").unlink()  # a plan file has all that it needs
    said = fails("--plan", plan)
    assert "error: 1 process for a plan of 2 ranks: nothing fits in 1.00 GiB, expected at least 1.23 GiB" in said
    assert "2 stages instead of 1 would fit; devices of 1.23 GiB would fit it as it is" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "argument --steps: found 0, expected a whole number above 0"),
        (["--lr", "fast"], "argument --lr: found fast, expected a number above 0"),
        (["--checkpoint", "/nowhere/checkpoints"], "--checkpoint: there is no folder /nowhere"),
    ],
)
def test_a_bad_option_is_an_error(options, message, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    with pytest.raises(SystemExit, match="2"):
        EXAMPLE["main"]()
    assert message in capsys.readouterr().err


def test_without_torchrun_it_says_how_to_start(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match="2"):
        EXAMPLE["main"]()
    assert "start it with torchrun" in capsys.readouterr().err
