"""Two trainers cannot hold one model_dir, and a dead one does not keep it."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from mesh_transformer import storage
from mesh_transformer.checkpoint import lock
from mesh_transformer.checkpoint.lock import Holder, Lock
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.errors import CheckpointError


def leave(folder, **changes):
    """A lock file as another holder would leave it."""
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "started": "0", "renewed": time.time()}
    (folder / lock.NAME).write_bytes(Holder(**{**mine, **changes}).to_bytes())


def test_a_living_holder_keeps_others_out_and_is_named(tmp_path):
    with (
        Lock(tmp_path),
        pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on .*stop it, or choose"),
    ):
        Lock(tmp_path).acquire()
    with Lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_another_process_is_kept_out_until_it_is_killed(tmp_path):
    code = (
        "import sys, time; from mesh_transformer.checkpoint.lock import Lock; Lock(sys.argv[1]).acquire(); "
        "print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"in use by process {holder.pid} on"):
            Lock(tmp_path).acquire()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with Lock(tmp_path):
        pass


def test_a_reused_process_id_is_not_the_holder(tmp_path):
    leave(tmp_path, started="0")
    with Lock(tmp_path):
        pass


@pytest.mark.parametrize(("age", "held"), [(0, True), (lock.STALE_AFTER / 2, True), (lock.STALE_AFTER + 1, False)])
def test_a_holder_elsewhere_counts_while_it_renews(tmp_path, age, held):
    leave(tmp_path, host="elsewhere", renewed=time.time() - age)
    if held:
        with pytest.raises(CheckpointError, match="on elsewhere.*if it is surely gone, delete"):
            Lock(tmp_path).acquire()
    else:
        with Lock(tmp_path):
            pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"host": "x"}'])
def test_a_half_written_lock_is_taken_over(tmp_path, content):
    (tmp_path / lock.NAME).write_bytes(content)
    with Lock(tmp_path):
        pass


def test_of_many_that_start_at_once_one_wins(tmp_path):
    leave(tmp_path, started="0")
    won, lost = [], []
    start = threading.Barrier(8)

    def run():
        mine = Lock(tmp_path)
        start.wait()
        try:
            mine.acquire()
            won.append(mine)
        except CheckpointError:
            lost.append(mine)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 7
    won[0].release()


def test_it_is_renewed_and_a_loss_is_noticed(tmp_path):
    mine = Lock(tmp_path, renew_every=0.02)
    mine.acquire()
    first = storage.read_bytes(mine.path)
    deadline = time.monotonic() + 20
    while storage.read_bytes(mine.path) == first:
        assert time.monotonic() < deadline, "not renewed"
        time.sleep(0.02)
    mine.check()
    other = Holder("elsewhere", 1, "0", time.time()).to_bytes()
    while not storage.swap(mine.path, storage.read_bytes(mine.path), other):
        assert time.monotonic() < deadline, "never the same for two calls"
    while True:
        try:
            mine.check()
        except CheckpointError as error:
            assert "another trainer took it over" in str(error)
            break
        assert time.monotonic() < deadline, "not noticed"
        time.sleep(0.02)
    mine.release()
    assert storage.read_bytes(mine.path) == other, "it is the other's lock now"


def test_a_store_is_held_by_one(tmp_path):
    with CheckpointStore(tmp_path).hold():
        with pytest.raises(CheckpointError, match="is in use by process"), CheckpointStore(tmp_path).hold():
            pass
    with CheckpointStore(tmp_path).hold():
        pass
