"""A checkpoint on a web server loads by its URL, with or without range requests."""

import contextlib
import functools
import http.server
import os
import threading

import pytest
from checkpoint_tools import assert_states_equal, config_of, random_state, without_fsync
from conftest import mesh_of

from mesh_transformer import storage
from mesh_transformer.checkpoint import convert
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.inspect import inspect
from mesh_transformer.checkpoint.shards import read_step
from mesh_transformer.checkpoint.store import CheckpointStore, find_step
from mesh_transformer.errors import StorageError

CONFIG = config_of(2, layers=1)
MESH = mesh_of(1, 2)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves files, and parts of them, as large web servers do; folders are not listed."""

    def list_directory(self, _path):
        self.send_error(403)

    def do_GET(self):  # noqa: N802 - the base class asks for this name
        wanted = self.headers.get("Range")
        path = self.translate_path(self.path)
        if wanted is None or not os.path.isfile(path):
            super().do_GET()
            return
        size = os.path.getsize(path)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = (int(first), int(last or size - 1) + 1) if first else (size - int(last), size)
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read(stop - start)
        if not content:
            self.send_error(416)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{start + len(content) - 1}/{size}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self):
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, *_arguments):
        pass


class Whole(http.server.SimpleHTTPRequestHandler):
    """Serves whole files only."""

    def log_message(self, *_arguments):
        pass


@contextlib.contextmanager
def serving(folder, handler):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A model_dir with step 5."""
    without_fsync(monkeypatch)
    store = CheckpointStore(tmp_path / "run")
    store.save(5, random_state(CONFIG.model, MESH), CONFIG)
    store.wait()
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("handler", "with_manifest"), [(Ranges, True), (Ranges, False), (Whole, False)])
def test_a_step_loads_by_its_url(run, handler, with_manifest):
    if not with_manifest:
        os.remove(run / "run" / "step_5" / "manifest.json")
    with serving(run, handler) as url:
        path = find_step(f"{url}/run/")
        assert path == f"{url}/run/step_5"
        assert_states_equal(read_step(path, CONFIG.model, MESH), random_state(CONFIG.model, MESH))
        assert inspect(f"{url}/run/step_5").counters["step"] == 9


def test_missing_files_are_told_from_a_server_that_is_not_there(run):
    os.remove(run / "run" / "step_5" / "shard_0" / "3.npz")
    os.remove(run / "run" / "step_5" / "shard_1" / "15.npz")
    with serving(run, Ranges) as url:
        with pytest.raises(DamagedError, match=r"complete: shard_0/3\.npz is missing; shard_1/15\.npz is missing"):
            read_step(f"{url}/run/step_5", CONFIG.model, MESH)
        with pytest.raises(DamagedError, match=r"step_6 holds no checkpoint step; expected shard_0/0\.npz there"):
            read_step(f"{url}/run/step_6", CONFIG.model, MESH)
        with pytest.raises(StorageError, match="only local and gs:// paths can be written"):
            storage.probe_writable(f"{url}/run")
    with pytest.raises(StorageError, match="cannot open"):
        read_step(f"{url}/run/step_5", CONFIG.model, MESH)


@pytest.mark.slow
def test_a_step_is_converted_from_its_url(run):
    """Of the 2021 library too, whose folder of steps cannot be listed there."""
    with serving(run, Ranges) as url:
        one = convert.reshard(f"{url}/run/step_5", run / "one", 1)
        os.remove(run / "run" / "step_5" / "manifest.json")
        again = convert.reshard(f"{url}/run/step_5", run / "again", 1, config=CONFIG)
    assert_states_equal(read_step(one.path, CONFIG.model, MESH), random_state(CONFIG.model, MESH))
    assert_states_equal(read_step(again.path, CONFIG.model, MESH), random_state(CONFIG.model, MESH))
