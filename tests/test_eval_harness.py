"""eval_harness.py, the harness's own command, perplexity, and evaluation in training, from end to end."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from data_tools import tokenizer_path
from evaluation_tools import ROOT, TASKS, trained
from training_tools import Run, counting, make_data

import eval_harness
from mesh_transformer import load_config
from mesh_transformer.evaluation import perplexity, plugin

HARNESS = find_spec("lm_eval") is not None
harness = pytest.mark.skipif(not HARNESS, reason="lm-eval is not installed (the extra `evaluation`)")
WORD = TASKS["word"]
NUMBER = re.compile(r"\d+\.\d+")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """The example tasks name their data from there."""
    monkeypatch.chdir(ROOT)


def arguments(*more, mp=1, devices=1):
    model = trained()
    return ["--config", model.config_file(mp), "--platform", "cpu", "--devices", str(devices), *more]


@harness
def test_a_table_and_a_file_with_everything_a_figure_depends_on(tmp_path, capsys):
    out = tmp_path / "results"
    asked = arguments("--tasks", f"{WORD},{TASKS['text']}", "--limit", "8", "--output", str(out))
    assert eval_harness.main(asked) == 0
    shown = capsys.readouterr().out
    found = json.loads((out / "results.json").read_text())
    assert {"python_word", "python_text"} == {row["task"] for row in found["metrics"]}
    for row in found["metrics"]:
        assert f"{row['value']:.4f}" in shown and row["documents"] == 8
    (accuracy,) = (row for row in found["metrics"] if row["metric"] == "acc")
    assert 0 <= accuracy["value"] <= 1 and accuracy["stderr"] is not None and accuracy["version"] == 1
    assert found["model"]["checkpoint"].endswith("step_1") and len(found["model"]["checkpoint_hash"]) == 16
    assert found["model"]["config"] == load_config(trained().config_file(1)).to_dict()
    assert found["settings"] == {
        "tasks": [WORD, TASKS["text"]], "num_fewshot": None, "limit": 8, "bootstraps": 1000
    }  # fmt: skip
    assert {"jax", "lm_eval", "python"} <= found["versions"].keys()
    assert shown.strip() in (out / "results.md").read_text()


@harness
def test_an_evaluation_that_was_stopped_goes_on(tmp_path, caplog, capsys):
    out = tmp_path / "results"
    assert eval_harness.main(arguments("--tasks", WORD, "--limit", "6", "--output", str(out))) == 0
    first = capsys.readouterr().out
    answers = (out / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 6
    (out / "answers.jsonl").write_text("\n".join(answers[:4]) + "\n")
    caplog.clear()
    assert eval_harness.main(arguments("--tasks", WORD, "--limit", "6", "--output", str(out))) == 0
    assert "4 of 6 are known already" in caplog.text
    again = capsys.readouterr().out
    # Answers in a batch of another size differ in the last bits of a float32.
    assert NUMBER.sub("#", again) == NUMBER.sub("#", first)
    assert [float(x) for x in NUMBER.findall(again)] == pytest.approx(
        [float(x) for x in NUMBER.findall(first)], rel=1e-6
    )
    assert len((out / "answers.jsonl").read_text().splitlines()) == 6


@harness
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tasks", "no_such_task_at_all"], "is not a task of lm-evaluation-harness"),
        (["--tasks", "gone.yaml"], "gone.yaml: there is no such task file"),
        (["--tasks", "hellaswag"], "task hellaswag cannot be loaded"),  # its data is not here, and nothing is fetched
        (["--tasks", WORD, "--ckpt", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_a_line(more, said, capsys):
    assert eval_harness.main(arguments(*more)) == 2
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown


def test_without_the_harness_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert eval_harness.main(arguments("--tasks", WORD)) == 2
    assert "pip install 'mesh-transformer[evaluation]'" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--limit", "0"], ["--limit", "1.5"], ["--batch-size", "0"], ["--tasks", ","]])
def test_options_are_checked(wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        eval_harness.main(["--config", "x.json", *wrong])
    assert stopped.value.code == 2 and wrong[0] in capsys.readouterr().err


@harness
@pytest.mark.slow
@pytest.mark.parametrize("registered", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_harness_command_knows_the_model(tmp_path, registered):
    """The name is registered, the model's arguments arrive, and the results are those of eval_harness.py."""
    model = trained()
    command = ["-m", "mesh_transformer.evaluation"]
    if registered:  # the harness's command itself, in an environment with what `register` writes
        plugin.register(str(tmp_path))
        start = "import site, sys; site.addsitedir(sys.argv.pop(1)); import lm_eval.__main__ as h; h.cli_evaluate()"
        command = ["-c", start, str(tmp_path)]
    done = subprocess.run(
        [
            sys.executable, *command, "--model", "mesh_transformer", "--tasks", WORD,
            "--batch_size", "auto", "--limit", "6", "--output_path", str(tmp_path / "out"), "--model_args",
            f"config={model.config_file(1)},ckpt={model.step_dir},platform=cpu,devices=1",
        ],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(path.read_text())
    assert theirs["config"]["model"] == "mesh_transformer"
    out = tmp_path / "ours"
    assert eval_harness.main(arguments("--tasks", WORD, "--limit", "6", "--output", str(out))) == 0
    ours = json.loads((out / "results.json").read_text())
    assert theirs["config"]["checkpoint_hash"] == ours["model"]["checkpoint_hash"]
    (accuracy,) = (row["value"] for row in ours["metrics"] if row["metric"] == "acc")
    assert theirs["results"]["python_word"]["acc,none"] == accuracy


def test_what_makes_lm_eval_know_the_model_can_be_undone(tmp_path):
    path = plugin.register(str(tmp_path))
    assert path.read_text().startswith("import ") and path.suffix == ".pth"
    quick = "import site, sys; site.addsitedir(sys.argv[1]); print('lm_eval' in sys.modules, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", quick, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False False\n", "")
    plugin.unregister(str(tmp_path))
    plugin.unregister(str(tmp_path))
    assert not path.exists()


def test_model_arguments_that_there_are_not():
    pytest.importorskip("lm_eval")
    from mesh_transformer.errors import EvaluationError
    from mesh_transformer.evaluation.harness import MeshTransformerLM

    with pytest.raises(EvaluationError, match="model_args has chkpt; the nearest that is known is ckpt"):
        MeshTransformerLM.create_from_arg_string("config=x,chkpt=y")
    with pytest.raises(EvaluationError, match="needs config=FILE"):
        MeshTransformerLM.create_from_arg_string("ckpt=y")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two validated steps, with a task evaluated after each where the harness is there."""
    folder = tmp_path_factory.mktemp("run")
    data = make_data(tmp_path_factory.mktemp("data"))
    before = os.getcwd()
    os.chdir(ROOT)
    task = folder / "count.yaml"
    lines = [{"context": "".join(chr(65 + (s + 3 * i) % 26) for i in range(4)), "word": "cat"} for s in range(3)]
    (folder / "count.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task.write_text(Path(WORD).read_text().replace("data/eval/python_word.jsonl", str(folder / "count.jsonl")))
    keys = {"n_vocab": 320, "tokenizer": tokenizer_path(), "val_every": 2, "ckpt_every": 1, "total_steps": 2}
    if HARNESS:
        keys |= {"eval_harness_tasks": [str(task)], "eval_every": 1}
    found = Run(folder, data, **keys)
    try:
        assert found() == 0
    finally:
        os.chdir(before)
    return found


@harness
def test_tasks_are_evaluated_in_training_on_the_live_weights(run, tmp_path):
    names = ("python_word-v1/acc", "python_word-v1/perplexity")
    assert [[name in line for name in names] for line in run.lines] == [[True, True]] * 2
    assert run.lines[0][names[1]] != run.lines[1][names[1]]
    for step, line in enumerate(run.lines, 1):
        out = tmp_path / str(step)
        asked = [*run.arguments(), "--tasks", run.keys["eval_harness_tasks"][0], "--ckpt-step", str(step)]
        assert eval_harness.main([*asked, "--output", str(out)]) == 0
        rows = {row["metric"]: row["value"] for row in json.loads((out / "results.json").read_text())["metrics"]}
        assert rows["perplexity"] == pytest.approx(line[names[1]], rel=1e-4)


@harness
def test_a_task_that_cannot_be_had_is_refused_before_devices_start(run, capsys):
    assert run(eval_harness_tasks=["no_such_task_at_all"]) == 2
    assert "is not a task of lm-evaluation-harness" in capsys.readouterr().err
    assert run("--dry-run", eval_harness_tasks=["no_such_task_at_all"], eval_every=0) == 0  # off: nobody asks for it


def test_perplexity_of_records_is_trainings_own_figure(run, capsys):
    """E05: the same number, from the checkpoint, as the run logged when it validated."""
    assert perplexity.main([*run.arguments(), "--data", "v", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == run.lines[-1]["val/loss_v"]
    assert found["sequences"] == run.lines[-1]["val/sequences_v"] == 10
    assert found["tokens"] == 10 * 16
    assert found["perplexity"] == pytest.approx(2.718281828459045 ** found["loss"])
    said = int((counting(10, 2)[:, 1:] != 0).sum())  # ids up to 256 are one byte each, but 0, end-of-text
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * 160 / 0.6931471805599453 / said)
    assert perplexity.main([*run.arguments(), "--data", "v", "--batches", "1"]) == 0
    assert "loss" in capsys.readouterr().out


def test_perplexity_of_text_is_that_of_its_documents(tmp_path, capsys):
    model = trained()
    text = "def main():\n    return 0\n" * 12
    path = tmp_path / "a.txt"
    path.write_text(text + "<|endoftext|>" + "import os\n")
    assert perplexity.main(arguments("--data", str(path), "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sequences"] == 2
    assert found["tokens"] == len(model.tokenizer.encode(text)) + len(model.tokenizer.encode("import os\n"))
    assert found["text_bytes"] == len(text) + 10
    assert 0.5 < found["loss"] < 6
    assert perplexity.main(arguments("--data", str(tmp_path / "none.txt"))) == 2
    assert "no such file" in capsys.readouterr().err


@harness
def test_the_version_is_an_option(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "results"
    text.write_text("import os\n")
    losses = []
    for version in ("1", "2"):
        asked = arguments("--random-init", "--version", version)
        assert perplexity.main([*asked, "--data", str(text), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] != losses[1]
    assert eval_harness.main([*asked, "--tasks", WORD, "--limit", "2", "--output", str(out)]) == 0
    assert json.loads((out / "results.json").read_text())["model"]["config"]["version"] == 2
