"""storage.py on local paths: names, atomic writes, swaps, and errors that name the path and keep their cause."""

import errno
import importlib.util
import os
import pathlib
import subprocess
import sys
import threading
import types

import pytest

from mesh_transformer import storage
from mesh_transformer.errors import StorageError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/x/step_10", "/x/step_10"),
        ("/x/step_10/", "/x/step_10"),
        ("file:///x/step_10", "/x/step_10"),
        ("file://localhost/x/a%20b/", "/x/a b"),
        (pathlib.Path("/x/step_10"), "/x/step_10"),
        ("gs://bucket/x/", "gs://bucket/x"),
        ("/", "/"),
        ("x", "x"),
    ],
)
def test_spellings_of_one_path_meet(given, expected):
    assert storage.normalise(given) == expected


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert storage.normalise("~/x") == "/home/someone/x"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("/x", "step_1", "shard_0"), "/x/step_1/shard_0"),
        (("/x/", "a/"), "/x/a"),
        (("/x", "/y"), "/y"),
        (("gs://b/x", "y"), "gs://b/x/y"),
        (("gs://b/x", "/y"), "/y"),
        (("/x", "gs://b/y"), "gs://b/y"),
        (("/", "x"), "/x"),
        (("x", "file:///y"), "/y"),
    ],
)
def test_join(parts, expected):
    assert storage.join(*parts) == expected


def test_parent_and_name():
    assert storage.parent("/x/y/") == "/x"
    assert storage.parent("/x") == "/"
    assert storage.parent("x") == "."
    assert storage.name("gs://b/x/y/") == "y"


@pytest.mark.parametrize("path", ["", "file://host/x", "file:x", "a\0b", "gs://bucket/a\0b", "gs://bucket/\udcff"])
def test_paths_that_mean_nothing_are_refused(path):
    with pytest.raises(StorageError):
        storage.normalise(path)


def test_a_name_that_the_locale_lacks_is_refused_in_a_line():
    """In an ASCII locale, which a bare container may have; every function takes its path through `normalise`."""
    code = "from mesh_transformer import storage; storage.makedirs('mod\\xe8le')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == (
        "mesh_transformer.errors.StorageError: 'mod\\xe8le': names are in ascii here, which lacks characters of this "
        "one: set PYTHONUTF8=1 or LC_ALL=C.UTF-8, or choose another path"
    )


def test_write_read_list_remove(tmp_path):
    path = storage.join(tmp_path, "a", "b.json")
    storage.makedirs(storage.parent(path))
    storage.write_atomic(path, b"one")
    storage.write_atomic(path, b"two")
    assert storage.read_bytes(path) == b"two"
    assert storage.read_bytes(f"file://{path}") == b"two"
    assert storage.size(path) == 3
    assert storage.listdir(tmp_path) == ["a"]
    assert storage.listdir(tmp_path / "a") == ["b.json"], "a draft was left behind"
    assert storage.listdir(tmp_path / "none") == []
    storage.remove(path)
    storage.remove(path)
    assert not storage.exists(path)
    storage.remove_tree(tmp_path / "a")
    storage.remove_tree(tmp_path / "a")
    assert storage.listdir(tmp_path) == []


def test_remove_tree_removes_a_link_and_not_what_it_points_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    storage.remove_tree(tmp_path / "link")
    assert (tmp_path / "kept" / "file").exists()


def test_failed_atomic_write_keeps_the_old_content_and_its_cause(tmp_path, monkeypatch):
    path = tmp_path / "meta.json"
    storage.write_atomic(path, b"old")

    def full_disk(_file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "sync", full_disk)
    with pytest.raises(StorageError, match=r"meta\.json.*No space left.*free some space") as caught:
        storage.write_atomic(path, b"new")
    assert isinstance(caught.value.__cause__, OSError)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["meta.json"]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"nothing\.npz: cannot open.*check the path") as caught:
        storage.open_file(tmp_path / "nothing.npz")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_keyboard_interrupt_passes():
    with pytest.raises(KeyboardInterrupt), storage.errors("x", "write"):
        raise KeyboardInterrupt


def test_own_mistakes_are_not_dressed_as_storage_errors():
    with pytest.raises(ZeroDivisionError), storage.errors("x", "write"):
        _ = 1 // 0


def test_probe_leaves_nothing_behind(tmp_path):
    storage.probe_writable(tmp_path / "new" / "deeper")
    storage.probe_writable(tmp_path)
    assert os.listdir(tmp_path) == []


def test_probe_names_the_folder_and_the_cause(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file/run: cannot write into") as caught:
        storage.probe_writable(tmp_path / "file" / "run")
    assert isinstance(caught.value.__cause__, OSError)


def test_what_stands_in_the_way_is_said_with_what_to_do(tmp_path):
    (tmp_path / "file").write_text("x")
    for call in (storage.listdir, storage.makedirs, lambda path: storage.write_atomic(f"{path}/x", b"")):
        with pytest.raises(StorageError, match="file.*a file stands where a folder is needed: move it away"):
            call(tmp_path / "file")
    with pytest.raises(StorageError, match="a folder stands where a file is needed: move it away"):
        storage.read_bytes(tmp_path)
    with pytest.raises(StorageError, match="choose a shorter path"):
        storage.open_file(tmp_path / ("x" * 300))


def test_probe_of_a_read_only_folder_chains_permission_error(tmp_path, monkeypatch):
    # Tests may run as root, to whom every folder is writable: the system call is made to answer instead.
    def denied(path, *_args, **_options):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "makedirs", denied)
    with pytest.raises(StorageError, match=r"run: cannot write into: Permission denied; this user") as caught:
        storage.probe_writable(tmp_path / "run")
    assert isinstance(caught.value.__cause__, PermissionError)


def test_free_bytes_of_a_folder_to_come(tmp_path):
    free = storage.free_bytes(tmp_path / "x" / "y")
    assert free is not None
    assert free > 0
    assert storage.free_bytes("gs://bucket/x") is None


def test_other_urls_are_for_reading():
    for call in (storage.makedirs, storage.listdir, lambda path: storage.write_atomic(path, b"")):
        with pytest.raises(StorageError, match="only local and gs://"):
            call("https://example.org/x")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        pytest.param(
            "ssh://host/x",
            r"reading ssh:// needs a package that is not installed: pip install 'smart_open\[ssh\]'",
            marks=pytest.mark.skipif(importlib.util.find_spec("paramiko") is not None, reason="paramiko is there"),
        ),
        ("nonsense://host/x", "smart_open reads no nonsense:// here; expected a local path, gs://"),
        ("ftp://127.0.0.1/x", "cannot open: you must specify the user; check the URL"),
    ],
)
def test_urls_that_cannot_be_read_are_refused_in_a_line(url, problem):
    with pytest.raises(StorageError, match=problem) as caught:
        storage.read_bytes(url)
    assert "\n" not in str(caught.value)


def test_errors_of_other_packages_count_as_the_storages(monkeypatch):
    class ClientError(Exception):
        pass

    package = types.SimpleNamespace(BotoCoreError=ClientError, ClientError=ClientError)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", package)
    with (
        pytest.raises(StorageError, match="s3://b/x: cannot read: the token is old"),
        storage.errors("s3://b/x", "read"),
    ):
        raise ClientError("the token is old")


def test_swap_needs_the_old_content(tmp_path):
    path = tmp_path / "lock"
    assert not storage.swap(path, b"x", b"y")
    assert storage.swap(path, None, b"one")
    assert not storage.swap(path, None, b"two")
    assert storage.swap(path, b"one", b"two")
    assert storage.read_bytes(path) == b"two"
    assert not storage.swap(path, b"one", None)
    assert storage.swap(path, b"two", None)
    assert not path.exists()


def test_one_of_many_swaps_wins(tmp_path):
    wins = []

    def take(number):
        if storage.swap(tmp_path / "lock", None, str(number).encode()):
            wins.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert storage.read_bytes(tmp_path / "lock") == str(wins[0]).encode()


def test_local_paths_need_no_cloud_package(tmp_path):
    """In a Python that has no google package and no smart_open, local storage does everything."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("google", "smart_open"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from mesh_transformer import storage
folder = sys.argv[1]
storage.probe_writable(folder)
storage.write_atomic(storage.join(folder, "x"), b"1")
assert storage.read_bytes("file://" + folder + "/x") == b"1"
try:
    storage.exists("gs://bucket/x")
except storage.StorageError as error:
    assert "pip install google-cloud-storage" in str(error), error
else:
    raise SystemExit("gs:// without its package was accepted")
try:
    storage.open_file("s3://bucket/x")
except storage.StorageError as error:
    assert "pip install smart_open" in str(error), error
else:
    raise SystemExit("s3:// without its package was accepted")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
