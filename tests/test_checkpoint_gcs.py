"""The same storage and checkpoints in a bucket: google-cloud-storage against a real server, on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bucket_tools import free_port, run_server
from checkpoint_tools import assert_states_equal, config_of, random_state
from conftest import mesh_of

from mesh_transformer import gcs, storage
from mesh_transformer.checkpoint.lock import Lock
from mesh_transformer.checkpoint.shards import read_step, snapshot, write_step
from mesh_transformer.checkpoint.store import CheckpointStore, find_step
from mesh_transformer.errors import CheckpointError, StorageError

pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage (pip install mesh-transformer[gcs])")

ROOT = Path(__file__).parent.parent
CONFIG = config_of(2, layers=1)
MESH = mesh_of(1, 2)


@pytest.fixture(scope="module")
def server():
    port = free_port()
    with run_server(port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def bucket(server, monkeypatch, request):
    """A bucket of its own for each test."""
    from google.cloud import storage as cloud

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server)
    name = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    cloud.Client.create_anonymous_client().create_bucket(name)
    return f"gs://{name}"


def test_storage(bucket):
    path = storage.join(bucket, "run", "a.json")
    assert not storage.exists(path)
    storage.write_atomic(path, b"one")
    storage.write_atomic(path, b"two")
    assert storage.read_bytes(path) == b"two"
    assert storage.size(path) == 3
    with storage.open_file(storage.join(bucket, "run", "deep", "b.txt"), "w") as file:
        file.write("line\n")
    with storage.open_file(storage.join(bucket, "run", "deep", "b.txt"), "r") as file:
        assert list(file) == ["line\n"]
    assert storage.listdir(storage.join(bucket, "run")) == ["a.json", "deep"]
    assert storage.listdir(f"{bucket}/run/") == ["a.json", "deep"]
    assert storage.listdir(bucket) == ["run"]
    assert storage.exists(storage.join(bucket, "run"))
    assert not storage.exists(storage.join(bucket, "ru"))
    storage.probe_writable(storage.join(bucket, "run"))
    storage.remove_tree(storage.join(bucket, "run", "deep"))
    storage.remove(path)
    storage.remove(path)
    assert storage.listdir(bucket) == []
    assert storage.free_bytes(bucket) is None


def test_reading_by_ranges(bucket):
    path = storage.join(bucket, "big")
    content = np.random.default_rng(0).bytes(3 << 20)
    with storage.open_file(path, "wb") as file:
        file.write(content)
    with storage.open_file(path) as file:
        file.seek(-100, os.SEEK_END)
        assert file.read() == content[-100:]
        file.seek(12345)
        assert file.read(10) == content[12345:12355]
    import google_crc32c

    assert gcs.crc32c(path) == f"{google_crc32c.value(content):08x}"


def test_errors_name_the_path_and_keep_their_cause(bucket):
    from google.api_core.exceptions import NotFound

    with pytest.raises(StorageError, match=f"{bucket}/none: cannot open.*check the path") as caught:
        storage.open_file(f"{bucket}/none")
    assert isinstance(caught.value.__cause__, NotFound)
    for call in (storage.probe_writable, storage.listdir, storage.exists, storage.read_bytes, storage.size):
        with pytest.raises(StorageError) as caught:
            call("gs://no-such-bucket/x")
        problem = str(caught.value).partition(": cannot ")[2].partition(": ")[2]
        assert problem == (
            "there is no bucket no-such-bucket that this account can see; check the path, or make the bucket: "
            "gcloud storage buckets create gs://no-such-bucket"
        ), call
    with pytest.raises(StorageError, match="names no bucket"):
        storage.exists("gs:///x")
    with pytest.raises(StorageError, match="refusing to empty a whole bucket"):
        storage.remove_tree(bucket)


def test_swap(bucket):
    path = storage.join(bucket, "lock")
    assert not storage.swap(path, b"x", b"y")
    assert storage.swap(path, None, b"one")
    assert not storage.swap(path, None, b"two")
    assert storage.swap(path, b"one", b"two")
    assert not storage.swap(path, b"one", None)
    assert storage.swap(path, b"two", None)
    assert not storage.exists(path)
    with Lock(bucket), pytest.raises(CheckpointError, match="is in use by process"):
        Lock(bucket).acquire()
    assert storage.listdir(bucket) == []


def test_a_run_in_a_bucket(bucket, caplog):
    """Save, keep two, restore on another mesh, pass over damage, start over."""
    folder = storage.join(bucket, "models", "run")
    store = CheckpointStore(folder, keep_n=2)
    states = {step: random_state(CONFIG.model, MESH, step) for step in (1, 2, 3)}
    with store.hold():
        for step, state in states.items():
            store.save(step, state, CONFIG, {"file_idx": step})
        store.wait()
    assert storage.listdir(folder) == ["meta.json", "step_2", "step_3"]
    found = CheckpointStore(f"{folder}/").restore(CONFIG, mesh_of(2, 4))
    assert_states_equal(found.state, states[3])
    assert found.aux["train_loader"] == {"file_idx": 3}
    assert find_step(folder) == f"{folder}/step_3"
    for spelling in (f"{folder}/step_2", f"{folder}/step_2/"):
        assert_states_equal(read_step(spelling, CONFIG.model, MESH), states[2])

    damaged = storage.join(folder, "step_3", "shard_1", "4.npz")
    content = bytearray(storage.read_bytes(damaged))
    content[len(content) // 2] ^= 1
    storage.write_atomic(damaged, bytes(content))
    assert CheckpointStore(folder).restore(CONFIG, MESH).step == 2
    assert "shard_1/4.npz has checksum" in caplog.text

    storage.write_atomic(storage.join(folder, "notes.txt"), b"mine")
    assert store.delete_own() == []
    assert storage.listdir(folder) == ["notes.txt"]


def test_half_written_steps_are_cleared_away(bucket):
    folder = storage.join(bucket, "run")
    store = CheckpointStore(folder)
    store.save(1, random_state(CONFIG.model, MESH), CONFIG)
    store.wait()
    write_step(storage.join(folder, "step_2"), snapshot(random_state(CONFIG.model, MESH)), CONFIG.model, 2)
    storage.write_atomic(storage.join(folder, "step_2", ".unfinished"), b"")
    assert store.steps() == [1]
    with store.hold():
        assert storage.listdir(folder) == ["meta.json", "step_1", "trainer.lock"]
    storage.remove(storage.join(folder, "meta.json"))
    assert store.steps() == [1], "a lost meta.json is made good by the manifests"


def test_the_command_looks_into_a_bucket(bucket):
    step = storage.join(bucket, "step_9")
    write_step(step, snapshot(random_state(CONFIG.model, MESH)), CONFIG.model, 2)
    storage.remove(storage.join(step, "shard_0", "3.npz"))
    storage.remove(storage.join(step, "shard_1", "11.npz"))
    command = [sys.executable, "-m", "mesh_transformer.checkpoint", "inspect", step]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr == "error: shard_0/3.npz is missing\nerror: shard_1/11.npz is missing\n"
