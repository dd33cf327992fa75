"""The evaluation harness on two hosts: the scores and texts of one process."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from data_tools import tokenizer_path
from evaluation_tools import ROOT, TASKS, trained
from training_tools import Run, make_data

import device_train
import eval_harness
import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("uncached"),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (the extra `evaluation`)"),
]


def test_hosts_give_the_figures_of_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # the example tasks name their data from there
    tasks = ",".join(TASKS[name] for name in ("word", "order", "line"))
    asked = ["--config", trained().config_file(2), "--tasks", tasks, "--limit", "6"]
    hosts = ["--tpu", "local", "--hosts", "2", "--devices-per-host", "2"]
    assert eval_harness.main([*asked, *hosts, "--output", str(tmp_path / "pod")]) == 0
    shown = capsys.readouterr().out
    assert eval_harness.main([*asked, "--platform", "cpu", "--devices", "4", "--output", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == shown
    pod, one = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("pod", "one"))
    assert pod["metrics"] == one["metrics"]
    assert pod["model"] == one["model"]
    answers = [(tmp_path / name / "answers.jsonl").read_text().splitlines() for name in ("pod", "one")]
    assert len(answers[0]) == len(answers[1]) > 12


def test_tasks_in_training_are_evaluated_by_the_hosts(tmp_path, monkeypatch):
    """train.py on two hosts logs what device_train.py logs for the same steps on the same mesh."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "data").mkdir()
    data = make_data(tmp_path / "data")
    lines = [{"context": "".join(chr(65 + (s + 3 * i) % 26) for i in range(4)), "word": "cat"} for s in range(3)]
    (tmp_path / "count.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = tmp_path / "count.yaml"
    text = Path(TASKS["word"]).read_text()
    task.write_text(text.replace("data/eval/python_word.jsonl", str(tmp_path / "count.jsonl")))
    keys = {"n_vocab": 320, "tokenizer": tokenizer_path(), "val_every": 0, "ckpt_every": 2, "total_steps": 2}
    keys |= {"eval_harness_tasks": [str(task)], "eval_every": 1, "cores_per_replica": 2}
    pod, one = (Run(tmp_path / name, data, **keys) for name in ("pod", "one"))
    hosts = ["--tpu", "local", "--hosts", "2", "--devices-per-host", "2"]
    assert train.main([*pod.arguments()[:2], *hosts]) == 0
    assert device_train.main([*one.arguments()[:2], "--platform", "cpu", "--devices", "4"]) == 0
    for name in ("python_word-v1/acc", "python_word-v1/perplexity"):
        assert [line[name] for line in pod.lines] == pytest.approx([line[name] for line in one.lines], rel=1e-5)
        assert len(pod.lines) == 2


def test_devices_of_this_machine_and_hosts_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        eval_harness.parse(["--config", "c", "--tpu", "local", "--devices", "4"])
    assert "--platform and --devices are of this machine" in capsys.readouterr().err
