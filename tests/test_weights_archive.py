"""Published archives, as they are: streamed into a step folder, whole or without their optimizer."""

import io
import tarfile

import numpy as np
import pytest
import zstandard
from checkpoint_tools import read_plain, without_fsync
from weights_tools import ARCHIVE, assert_same_arrays, config_file, extract_golden, golden_config

from mesh_transformer import load_config, storage
from mesh_transformer.checkpoint import archive, archive_slim, convert, inventory, layout, manifest, streaming
from mesh_transformer.checkpoint.casting import FLOAT_TYPES
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.errors import CheckpointError
from scripts import unpack

CONFIG = load_config(golden_config("v1_rotary_mp4_f32"))


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    without_fsync(monkeypatch)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """The step in the archive, extracted by tarfile alone."""
    return extract_golden(tmp_path_factory.mktemp("golden"))


def pack(step, path, names=None, folder="step_8", codec="zstd"):
    """A tar of a step's files, in this order."""
    names = names or sorted(str(file.relative_to(step)) for file in step.rglob("*.npz"))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=f"w:{codec}" if codec == "gz" else "w") as tar:
        for name in names:
            tar.add(step / name, f"{folder}/{name}")
    content = packed.getvalue()
    path.write_bytes(zstandard.ZstdCompressor().compress(content) if codec == "zstd" else content)
    return path


def test_a_whole_archive_gives_the_same_files(tmp_path, step):
    done = archive.unpack(ARCHIVE, tmp_path / "out", CONFIG)
    for file in step.rglob("*.npz"):
        assert (tmp_path / "out" / "step_8" / file.relative_to(step)).read_bytes() == file.read_bytes()
    assert CheckpointStore(tmp_path / "out").steps() == [8]
    described = manifest.read(done)
    manifest.verify(done, described)
    assert described.details["config"]["n_heads"] == 8
    plain = archive.unpack(ARCHIVE, tmp_path / "plain")
    assert manifest.read(plain) is None and inventory.take(plain, CONFIG.model).full


@pytest.mark.parametrize("codec", ["gz", "tar"])
def test_other_packings_are_told_by_their_bytes(tmp_path, step, codec):
    packed = pack(step, tmp_path / "step_8.any", codec=codec)
    assert_same_arrays(archive.unpack(packed, tmp_path / "out"), step, 4)


@pytest.mark.parametrize("order", ["packed", "backwards", "by file"])
def test_the_optimizer_is_left_out_as_it_passes(tmp_path, step, order):
    """As slimming the unpacked step does; whatever the order, since tar takes a folder's files as they come."""
    names = sorted(str(file.relative_to(step)) for file in step.rglob("*.npz"))
    if order == "backwards":
        names = names[::-1]
    elif order == "by file":
        names.sort(key=lambda name: name.rpartition("/")[2])
    packed = ARCHIVE if order == "packed" else pack(step, tmp_path / "step_8.tar.zst", names)
    done = archive_slim.unpack_slim(packed, tmp_path / "out", CONFIG)
    params = len(layout.state_leaves(CONFIG.model, 4, full=False))
    for shard in range(4):
        expected = read_plain(step, shard)[-params:]
        assert all(np.array_equal(a, b) for a, b in zip(read_plain(done, shard), expected, strict=True))
    manifest.verify(done, manifest.read(done))
    assert sorted(storage.listdir(done)) == ["manifest.json", "shard_0", "shard_1", "shard_2", "shard_3"]


def test_in_sixteen_bits_too_and_of_a_slim_archive(tmp_path, step):
    cast = archive_slim.unpack_slim(ARCHIVE, tmp_path / "cast", CONFIG, FLOAT_TYPES["bf16"])
    slim = convert.slim(step, tmp_path / "slim", FLOAT_TYPES["bf16"], CONFIG).path
    with streaming.open_weights(cast) as a, streaming.open_weights(slim) as b:
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            assert x.dtype == y.dtype == FLOAT_TYPES["bf16"] and np.array_equal(x.value, y.value)
    packed = pack(tmp_path / "slim" / "step_8", tmp_path / "step_8_slim.tar.zstd", folder="step_8_slim")
    again = archive_slim.unpack_slim(packed, tmp_path / "again", CONFIG)
    assert_same_arrays(again, slim, 4)


def test_archives_that_are_not_whole_leave_nothing(tmp_path, step):
    cut = tmp_path / "cut_step_8.tar.zstd"
    cut.write_bytes(ARCHIVE.read_bytes()[:600_000])
    for tool in (archive.unpack, lambda path, out: archive_slim.unpack_slim(path, out, CONFIG)):
        with pytest.raises(DamagedError, match="cut_step_8.*it ends too early"):
            tool(cut, tmp_path / "out")
    names = sorted(str(file.relative_to(step)) for file in step.rglob("*.npz"))
    names.remove("shard_2/15.npz")
    lacking = pack(step, tmp_path / "lacking.tar.zst", names)
    with pytest.raises(DamagedError, match=r"shard_2/15\.npz is missing"):
        archive.unpack(lacking, tmp_path / "out")
    with pytest.raises(DamagedError, match=r"lacks shard_2/15\.npz"):
        archive_slim.unpack_slim(lacking, tmp_path / "out", CONFIG)
    text = tmp_path / "step_1.tar.zst"
    text.write_text("no archive")
    with pytest.raises(DamagedError, match="is no whole tar archive"):
        archive.unpack(text, tmp_path / "out")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_archives_of_something_else_are_refused(tmp_path, step, capsys):
    empty = tmp_path / "step_1.tar"
    tarfile.open(empty, "w").close()
    with pytest.raises(CheckpointError, match="holds no checkpoint step"):
        archive.unpack(empty, tmp_path / "out")
    nameless = pack(step, tmp_path / "weights.tar.zst", folder="weights")
    with pytest.raises(CheckpointError, match="rename it to say the step"):
        archive.unpack(nameless, tmp_path / "out")
    other = config_file(tmp_path, **golden_config("v1_rotary_mp4_f32", layers=3))
    assert unpack.main([str(ARCHIVE), str(tmp_path / "out"), "--config", other]) == 2
    assert "layers 3 in the config, 2 in the checkpoint (differs)" in capsys.readouterr().err
    assert unpack.main([str(ARCHIVE), str(tmp_path / "out"), "--config", other, "--params-only"]) == 2
    assert "use the config it was trained with" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        unpack.main([str(ARCHIVE), str(tmp_path / "out"), "--params-only"])
    same = config_file(tmp_path, **golden_config("v1_rotary_mp4_f32"))
    assert unpack.main([str(ARCHIVE), str(tmp_path / "out"), "--config", same, "--version", "2"]) == 2
    assert "version 2" in capsys.readouterr().err
