"""What no run of a model_dir wrote stays, and is seen before it gets in the way."""

import pytest
from test_checkpoint_store import save

from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.errors import CheckpointError


def test_new_deletes_only_what_this_project_wrote(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step_2" / "mine.txt").write_text("mine")
    (tmp_path / "step_2" / "shard_0" / "mine.npz").write_text("mine")
    (tmp_path / "step_77").mkdir()
    (tmp_path / "step_77" / "mine.txt").write_text("mine")
    left = store.delete_own()
    assert sorted(left) == [str(tmp_path / "step_2" / "mine.txt"), str(tmp_path / "step_2" / "shard_0" / "mine.npz")]
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["notes.txt", "step_2/mine.txt", "step_2/shard_0/mine.npz", "step_77/mine.txt"]
    assert store.steps() == []


def test_a_foreign_folder_in_the_way_is_not_overwritten(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="no run of this model_dir wrote it; move it away"):
        save(store, 1)
    assert (tmp_path / "step_1" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(("step", "last", "new", "refused"), [
    (1, 9, False, False),  # behind the newest step: nothing is saved there any more
    (2, 9, False, False),  # the newest itself
    (2, 9, True, True),  # deleted first, which leaves what is foreign
    (2, 1, True, False),  # the new run ends before
    (5, 9, False, True), (5, 9, True, True), (5, None, False, True), (5, 4, False, False),
])  # fmt: skip
def test_foreign_files_in_the_way_are_seen_before_a_run(tmp_path, step, last, new, refused):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    store.check_in_the_way(last, new)
    folder = tmp_path / f"step_{step}" / "shard_0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.txt").write_text("mine")
    if refused:
        with pytest.raises(
            CheckpointError, match=f"step_{step}, where step {step} would be saved, holds .*move it away"
        ):
            store.check_in_the_way(last, new)
    else:
        store.check_in_the_way(last, new)
