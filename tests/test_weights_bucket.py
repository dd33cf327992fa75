"""Every script on gs://, and what happens when the bucket, the permission, an object or the connection fails."""

import gc
import json

import numpy as np
import pytest
from bucket_tools import Proxy, free_port, run_server
from checkpoint_tools import config_of, write_2021
from training_tools import KEYS, make_data
from weights_tools import state_of

import device_train
import slim_model
import to_hf_weights
from mesh_transformer import storage
from mesh_transformer.checkpoint import __main__ as command
from mesh_transformer.checkpoint import convert, streaming
from mesh_transformer.checkpoint.npz import Header, NpzWriter
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.errors import CheckpointError, StorageError
from scripts import from_hf, reshard

pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage (pip install mesh-transformer[gcs])")


@pytest.fixture(scope="module")
def proxy():
    """A server, reached through a proxy that can drop connections."""
    port = free_port()
    proxy = Proxy(port)
    with run_server(port, proxy.port):
        yield proxy
    proxy.close()


@pytest.fixture
def bucket(proxy, monkeypatch, request):
    from google.cloud import storage as cloud

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{proxy.port}")
    proxy.drops.clear()
    proxy.answers.clear()
    name = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    cloud.Client.create_anonymous_client().create_bucket(name)
    return f"gs://{name}"


def upload(folder, target):
    for path in folder.rglob("*"):
        if path.is_file():
            storage.write_atomic(storage.join(target, str(path.relative_to(folder))), path.read_bytes())


@pytest.mark.slow
def test_train_save_resume_slim_reshard_and_export_in_a_bucket(bucket, tmp_path, capsys):
    """Config, data, model_dir and every output lie there."""
    upload(make_data(tmp_path), f"{bucket}/data")
    keys = KEYS | {
        "val_set": {},
        "cores_per_replica": 2,
        "bucket": bucket.removeprefix("gs://"),
        "model_dir": "run",
        "data_dir": f"{bucket}/data",
    }
    config = f"{bucket}/config.json"

    def train(total_steps):
        content = json.dumps(keys | {"total_steps": total_steps, "name": "tiny"}).encode()
        storage.write_atomic(config, content)
        return device_train.main(["--config", config, "--platform", "cpu", "--devices", "2"])

    assert train(2) == 0
    assert train(3) == 0
    assert "resuming" in capsys.readouterr().err
    assert CheckpointStore(f"{bucket}/run").latest() == 3
    assert slim_model.main(["--config", config, "--ckpt-step", "3"]) == 0
    slim = f"{bucket}/run_slim"
    assert storage.listdir(slim) == ["meta.json", "step_3"]
    assert reshard.main([f"{bucket}/run", f"{bucket}/one", "--shards", "1"]) == 0
    assert command.main(["verify", f"{bucket}/one"]) == command.main(["verify", slim]) == 0
    export = ["--input-ckpt", slim, "--config", config, "--output-path", f"{bucket}/hf", "--dtype", "fp32"]
    assert to_hf_weights.main(export) == 0
    assert from_hf.main([f"{bucket}/hf", f"{bucket}/back"]) == 0
    with streaming.open_weights(f"{bucket}/back") as back, streaming.open_weights(slim) as before:
        for x, y in zip(back.tensors(), before.tensors(), strict=True):
            if "embedding_shard/~/linear" not in x.leaf.label:  # its bias goes into its rows
                np.testing.assert_array_equal(x.value.astype(np.float32), y.value.astype(np.float32))


@pytest.fixture
def source(bucket, tmp_path):
    """A step of the 2021 library in the bucket; its config."""
    config = config_of(2)
    write_2021(tmp_path / "step_9", config.model, state_of(config.model, "trained"), 2)
    upload(tmp_path, f"{bucket}/run")
    return config


def test_a_connection_that_drops_once_is_tried_again(bucket, proxy, source):
    texts = ["shard_1%2F3.npz", "alt=media", "uploadType=resumable", "uploadType=multipart", "prefix="]
    proxy.drops += texts
    done = convert.reshard(f"{bucket}/run/step_9", f"{bucket}/out", 4, config=source)
    assert proxy.dropped == len(texts) and not proxy.drops
    with streaming.open_weights(done.path) as new, streaming.open_weights(f"{bucket}/run/step_9", source.model) as old:
        for x, y in zip(new.tensors(), old.tensors(), strict=True):
            np.testing.assert_array_equal(x.value, y.value)


def test_a_missing_bucket_is_named(bucket, source):
    with pytest.raises(StorageError, match=r"no-such-bucket.*check the path") as caught:
        convert.reshard(f"{bucket}/run/step_9", "gs://no-such-bucket/out", 1, config=source)
    assert type(caught.value.__cause__).__name__ == "NotFound"
    with pytest.raises((StorageError, CheckpointError), match="no-such-bucket"):
        streaming.open_weights("gs://no-such-bucket/run")


def test_missing_permission_is_said(bucket, proxy, source):
    proxy.answers["PUT"] = proxy.answers["POST"] = 403
    needed = f"this user needs permission there: a role on the bucket {bucket.removeprefix('gs://')}"
    with pytest.raises(StorageError, match=f"{bucket}/out.*{needed}") as caught:
        convert.reshard(f"{bucket}/run/step_9", f"{bucket}/out", 1, config=source)
    assert type(caught.value.__cause__).__name__ == "Forbidden"
    proxy.answers = {"GET": 403}
    with pytest.raises(StorageError, match=f"{bucket}/run.*this user needs permission there"):
        streaming.open_weights(f"{bucket}/run/step_9", source.model)


def test_an_object_that_vanishes_is_named_and_nothing_half_done_stays(bucket, source):
    with streaming.open_weights(f"{bucket}/run/step_9", source.model) as weights:
        leaves = streaming.tensor_leaves(weights.model, weights.shards, weights.full)
        weights.read(leaves[0])
        storage.remove(f"{bucket}/run/step_9/shard_1/4.npz")
        with pytest.raises(CheckpointError, match=r"shard_1/4.npz is missing"):
            for leaf in leaves:
                weights.read(leaf)
    with pytest.raises(CheckpointError, match=r"shard_1/4.npz is missing"):
        convert.reshard(f"{bucket}/run/step_9", f"{bucket}/out", 1, config=source)
    assert storage.listdir(f"{bucket}/out") == []


def test_what_failed_to_be_written_is_not_published_later(bucket, proxy, source):
    """Neither by closing it on the way out, nor when it is collected and the service works again."""
    writer = NpzWriter(f"{bucket}/out/0.npz")
    with pytest.raises(StorageError, match="the disk of the source"), writer:
        writer.add(Header((4,), np.dtype(np.float32)), [np.zeros(4, np.float32)])
        raise StorageError("the disk of the source")
    proxy.answers["POST"] = 403
    file = storage.open_file(f"{bucket}/out/1.npz", "wb")
    file.write(b"content")
    with pytest.raises(Exception, match="403"):
        file.close()
    proxy.answers.clear()
    del writer, file
    gc.collect()
    assert storage.listdir(f"{bucket}/out") == []
