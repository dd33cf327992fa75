"""The "orbax" layout in a bucket: Orbax and tensorstore reach the same server as this project's own storage."""

import importlib.util
import os

import jax
import pytest
from bucket_tools import free_port, run_server
from checkpoint_tools import assert_states_equal, config_of, random_state
from conftest import mesh_of

from mesh_transformer import storage
from mesh_transformer.checkpoint import __main__ as command
from mesh_transformer.checkpoint import formats, manifest, orbax_files
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.errors import StorageError

CONFIG = config_of(2, layers=1, ckpt_format="orbax")
MESH = mesh_of(1, 2)


@pytest.fixture(scope="module")
def bucket():
    """A bucket of a server on this machine; what the packages are told is told by `orbax_files`, not here."""
    pytest.importorskip("google.cloud.storage")
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage as google

    port = free_port()
    with pytest.MonkeyPatch.context() as patch, run_server(port):
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        for name in ("TENSORSTORE_GCS_HTTP_URL", "GCE_METADATA_ROOT"):
            patch.delenv(name, raising=False)
        orbax_files._tensorstore.cache_clear()
        orbax_files._orbax.cache_clear()
        client = google.Client(project="none", credentials=AnonymousCredentials())
        client.create_bucket("orbax-tests")
        yield "gs://orbax-tests"
    for name in ("TENSORSTORE_GCS_HTTP_URL", "GCE_METADATA_ROOT"):
        os.environ.pop(name, None)


def test_a_run_in_a_bucket(bucket, tmp_path, capsys):
    """Saved, kept, read on another mesh, looked into, damaged, converted to the local disk, deleted."""
    store = CheckpointStore(f"{bucket}/run", keep_n=2)
    states = [random_state(CONFIG.model, MESH, seed) for seed in range(3)]
    for step, state in enumerate(states, 1):
        store.save(step, state, CONFIG)
    store.wait()
    assert store.steps() == [2, 3] and storage.listdir(f"{bucket}/run") == ["meta.json", "step_2", "step_3"]
    assert_states_equal(store.restore(CONFIG, mesh_of(2, 4)).state, states[2])
    assert command.main(["verify", f"{bucket}/run"]) == 0
    assert command.main(["convert", f"{bucket}/run", str(tmp_path), "--format", "shards"]) == 0
    assert_states_equal(formats.read_step(tmp_path / "step_3", CONFIG.model, MESH), states[2])
    name = next(name for name in manifest.read(f"{bucket}/run/step_3").files if "params" in name and "q/0" in name)
    content = bytearray(storage.read_bytes(f"{bucket}/run/step_3/{name}"))
    content[7] ^= 1
    with storage.open_file(f"{bucket}/run/step_3/{name}", "wb") as file:
        file.write(content)
    with pytest.raises(DamagedError, match="has checksum"):
        store.restore(CONFIG, MESH, strict=True)
    assert store.restore(CONFIG, MESH).step == 2
    store.delete_own()
    assert storage.listdir(f"{bucket}/run") == []
    jax.block_until_ready(states)


def test_without_gcsfs_it_is_told_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gcsfs" else real(name, *a))
    with pytest.raises(StorageError, match=r"pip install 'mesh-transformer\[gcs,orbax\]'"):
        formats.write_step("gs://anywhere/step_1", random_state(CONFIG.model, MESH, full=False), CONFIG)
