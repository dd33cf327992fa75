"""The evaluation harness on two hosts: the scores and texts of one process."""

import json
from importlib.util import find_spec

import pytest
from evaluation_tools import ROOT, TASKS, trained

import eval_harness

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


def test_devices_of_this_machine_and_hosts_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        eval_harness.parse(["--config", "c", "--tpu", "local", "--devices", "4"])
    assert "--platform and --devices are of this machine" in capsys.readouterr().err
