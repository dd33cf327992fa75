"""Text, records and index in a bucket, from the script to the loader."""

from __future__ import annotations

from data_tools import prose, read_numbers, run_script, tokenizer_path
from test_checkpoint_gcs import bucket, server  # noqa: F401  fixtures

from mesh_transformer import storage
from mesh_transformer.data.loader import RecordLoader


def test_script_and_loader_in_a_bucket(bucket, tmp_path):  # noqa: F811
    for number in range(4):
        with storage.open_file(f"{bucket}/text/t{number}.txt", "wb") as file:
            file.write(prose(80, number).encode())
        (tmp_path / f"t{number}.txt").write_text(prose(80, number))
    flags = ("--tokenizer", tokenizer_path(), "--seq", 8, "--index", "--val-fraction", 0.25)
    assert run_script(f"{bucket}/text", "set", "--output-dir", f"{bucket}/data", *flags) == 0
    assert run_script(tmp_path, "set", "--output-dir", tmp_path / "data", *flags) == 0
    made = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert storage.listdir(f"{bucket}/data") == made and len(made) == 8
    for name in made:
        if name.endswith((".tfrecords", ".offsets", ".index")):
            assert storage.read_bytes(f"{bucket}/data/{name}") == (tmp_path / "data" / name).read_bytes()

    index = f"{bucket}/data/set.train.index"
    for shuffle in (False, True):
        with RecordLoader(index, (2,), 8, 300, shuffle=shuffle, epochs=1) as loader:
            first = read_numbers(loader, 3)
            with RecordLoader(index, (1,), 8, 300, shuffle=shuffle, epochs=1, position=loader.position) as resumed:
                rest = read_numbers(resumed)
        with RecordLoader(str(tmp_path / "data" / "set.train.index"), (1,), 8, 300, shuffle=shuffle, epochs=1) as local:
            assert first + rest == read_numbers(local)


def test_single_file_of_a_bucket_to_a_local_folder(bucket, tmp_path):  # noqa: F811
    with storage.open_file(f"{bucket}/one.txt", "wb") as file:
        file.write(prose(100, 0).encode())
    command = (f"{bucket}/one.txt", "one", "--output-dir", tmp_path, "--tokenizer", tokenizer_path(), "--seq", 8)
    assert run_script(*command, "--index", f"{bucket}/index") == 0
    assert storage.read_bytes(f"{bucket}/index/one.train.index").decode().splitlines()[1].startswith(str(tmp_path))
    with RecordLoader(f"{bucket}/index/one.train.index", (1,), 8, 300, epochs=1) as loader:
        assert read_numbers(loader)
