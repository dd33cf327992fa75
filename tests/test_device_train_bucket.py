"""A whole run whose model_dir lies in a bucket, against a real server on this machine."""

import json

import pytest
from test_checkpoint_gcs import bucket, server  # noqa: F401 - fixtures
from training_tools import Run, make_data

from mesh_transformer import storage


@pytest.mark.slow
def test_train_stop_and_go_on_in_a_bucket(bucket, tmp_path):  # noqa: F811
    run = Run(tmp_path / "run", make_data(tmp_path), bucket=bucket.removeprefix("gs://"), model_dir="runs/tiny")
    model_dir = f"{bucket}/runs/tiny"
    assert run("--dry-run") == 0
    assert storage.listdir(bucket) == []
    assert run(total_steps=2, ckpt_every=1) == 0
    assert run(total_steps=3) == 0
    lines = storage.read_bytes(f"{model_dir}/metrics.jsonl").decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert storage.listdir(model_dir) == ["meta.json", "metrics.jsonl", "step_1", "step_2", "step_3"]
    assert run("--new", "--yes", total_steps=1) == 0
    assert storage.listdir(model_dir) == ["meta.json", "metrics.jsonl", "step_1"]


def test_a_bucket_that_is_not_there_is_said_in_a_line(bucket, tmp_path, capsys):  # noqa: F811
    """As model_dir and as the data's folder, before devices start."""
    run = Run(tmp_path / "run", make_data(tmp_path))
    for keys in ({"bucket": "no-such-bucket", "model_dir": "x"}, {"data_dir": "gs://no-such-bucket/data"}):
        assert run(**keys) == 2
        said = capsys.readouterr().err.splitlines()
        assert "there is no bucket no-such-bucket that this account can see" in said[-1]
        assert [line.startswith("error: ") for line in said] == [True]
