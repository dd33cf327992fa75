"""Both ways between a bucket and Hugging Face's form, against a real server on this machine."""

from __future__ import annotations

import numpy as np
from hf_tools import hf_tensors, read_folder, write_step
from test_checkpoint_gcs import bucket, server  # noqa: F401  fixtures

from mesh_transformer import storage
from mesh_transformer.checkpoint.huggingface import convert
from mesh_transformer.checkpoint.huggingface_import import from_hf
from mesh_transformer.checkpoint.streaming import open_weights


def test_out_and_back_in_a_bucket(tmp_path, bucket):  # noqa: F811
    config, tree = write_step(tmp_path / "step_7", 2, layers=1, bias=False)
    done = convert(tmp_path / "step_7", config, f"{bucket}/hf", dtype="fp32", max_shard_size="20KB")
    assert len(done.files) > 1 and set(done.files) < set(storage.listdir(f"{bucket}/hf"))
    back = from_hf(f"{bucket}/hf", f"{bucket}/run")
    assert back.path == f"{bucket}/run/step_7" and back.config == f"{bucket}/run/config.json"
    with open_weights(f"{bucket}/run") as weights:
        assert (weights.shards, weights.step) == (1, 7)
    convert(f"{bucket}/run", back.config, tmp_path / "hf", dtype="fp32")
    for name, value in hf_tensors(tree).items():
        np.testing.assert_array_equal(read_folder(tmp_path / "hf")[name], value, err_msg=name)
