"""The config report: figures against hand-made ones, and how the command ends."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.config import SPECS, load_config, resolve_epochs
from mesh_transformer.config_records import count_records
from mesh_transformer.config_report import advice, device_bytes, main, markdown, report, size

ROOT = Path(__file__).parent.parent
TINY = {
    "layers": 2, "d_model": 64, "n_heads": 8, "n_vocab": 128, "seq": 32, "cores_per_replica": 4, "per_replica_batch": 2,
    "gradient_accumulation_steps": 2, "lr": 5e-5, "end_lr": 1e-5, "warmup_steps": 7, "anneal_steps": 65,
    "total_steps": 72, "train_set": "text.train.index", "model_dir": "run",
}  # fmt: skip


def write_set(folder: Path, name: str, counts: list[int | None]) -> None:
    """An index of empty record files; a count of None leaves the description out."""
    files = [f"{name}_{number}.tfrecords" for number in range(len(counts))]
    for file, records in zip(files, counts, strict=True):
        (folder / file).write_bytes(b"1234")
        if records is not None:
            (folder / f"{file}.json").write_text(json.dumps({"records": records, "bytes": 4}))
    (folder / f"{name}.index").write_text("# a comment\r\n\r\n" + "\r\n".join(files))


def shown(text: str, key: str) -> str:
    """What the report says behind `key`."""
    found = re.search(rf"^ *{re.escape(key)} +(.*)$", text, re.M)
    assert found, f"{key} is not in the report:\n{text}"
    return found[1]


def test_parameter_count_is_by_hand_and_the_same_on_every_mesh():
    d, vocab, layers = 64, 128, 2
    layer = 2 * d + 4 * d * d + (d * 4 * d + 4 * d) + (4 * d * d + d)
    expected = (vocab * d + d) + layers * layer + 2 * d + (d * vocab + vocab)
    for mp in (1, 2, 4):
        text = report(load_config({**TINY, "cores_per_replica": mp}), 4)
        assert shown(text, "parameters") == f"{expected:,} (the same on every mesh)"


def test_bytes_per_device_by_hand():
    d, vocab, layers = 64, 128, 2
    for mp in (1, 4):
        split = vocab * d + layers * (4 * d * d + 8 * d * d + 4 * d) + d * vocab + vocab
        whole = d + layers * (2 * d + d) + 2 * d
        held = split // mp + whole
        config = load_config({**TINY, "cores_per_replica": mp})
        found = device_bytes(config)
        assert (found.weights, found.gradients, found.optimizer) == (4 * held, 4 * held, 8 * held)
        assert found.total == 16 * held
        assert f"({16 * held:,} bytes)" in shown(report(config, 4), "per device")
    assert device_bytes(load_config({**TINY, "early_cast": True})).weights == 2 * held


def test_activations_by_hand():
    """28 layers of 4096, 2048 positions, 8 shards: every layer's input in bfloat16, and one layer's work."""
    keys = {"layers": 28, "d_model": 4096, "n_heads": 16, "n_vocab": 50400, "seq": 2048, "per_replica_batch": 1}
    config = load_config({**TINY, **keys, "cores_per_replica": 8, "remat": "full"})
    unit = 2048 * 4096 * 2
    expected = 28 * unit + unit * 5 + unit * (2 + 5 * 4) // 8
    assert shown(report(config, 8), "activations") == (
        f"about {size(expected, exact=False)} with remat full, in bfloat16; on a CPU twice as much"
    )
    auto = shown(report(load_config({**TINY, **keys, "compute_dtype": "float32"}), 8), "activations")
    assert auto.endswith("in float32") and " with remat dots or about " in auto


def test_what_zero_stage_does_to_a_device_by_hand():
    d, vocab, layers, dp = 64, 128, 2, 4
    cut = vocab * d + layers * (4 * d * d + 8 * d * d) + d * vocab  # matrices
    vectors = d + layers * (2 * d + d + 4 * d) + 2 * d + vocab
    whole, part = cut + vectors, cut // dp + vectors
    bytes_of = {0: 16 * whole, 1: 8 * whole + 8 * part, 3: 16 * part}
    for stage, held in bytes_of.items():
        config = load_config({**TINY, "cores_per_replica": 1, "zero_stage": stage})
        assert device_bytes(config, dp).total == held
        said = shown(report(config, dp), f"zero_stage {stage}")
        assert ("cut over the replicas" in said) == (stage > 0) and ("weights" in said) == (stage == 3)
        for other in bytes_of.keys() - {stage}:
            assert f"stage {other} {size(bytes_of[other]).split(' (')[0]}" in said
    assert "zero_stage 0 " not in report(load_config(TINY), 4).split("per device")[1], "one replica has nothing to cut"


def test_what_early_collect_holds_besides():
    matrices = 2 * 16 * 64 * 64  # of version 2's layers
    config = {**TINY, "version": 2, "cores_per_replica": 1}
    assert f"({2 * matrices:,} bytes)" in shown(report(load_config(config), 2), "early_collect     holds")
    assert "holds" not in report(load_config({**config, "early_collect": False}), 2)


def test_mesh_and_batch():
    text = report(load_config(TINY), 8)
    assert shown(text, "mesh") == "dp 2 x mp 4: 2 replicas of 4 devices, 2 heads on each device"
    assert shown(text, "update") == "256 tokens = 8 sequences (2 microbatches x 2 x dp 2) of 32"
    assert shown(text, "devices") == "8"
    assert "assumed" in shown(report(load_config(TINY)), "devices")
    text = report(load_config({**TINY, "tpu_size": 16}), 8)
    assert "tpu_size is 16, but 8 devices" in text


def test_every_key_is_shown_with_where_it_comes_from():
    text = report(load_config(TINY))
    for key in SPECS.keys() - {"version"}:
        shown(text, key)
    assert shown(text, "lr") == "5e-05"
    assert shown(text, "seed") == "42  (default)"
    assert shown(text, "pe_rotary_dims") == "8  (default: the head size)"


def test_schedule_in_steps_and_epochs(tmp_path):
    write_set(tmp_path, "text.train", [100, 188])
    text = report(load_config({**TINY, "data_dir": str(tmp_path)}), 4)
    assert "72 steps = 1.00 epochs of 288 sequences" in text
    lines = [line.split(maxsplit=3) for line in text.splitlines() if re.match(r" +\d+  +\d+\.\d\d  ", line)]
    assert [(step, epoch, rate) for step, epoch, rate, _ in lines] == [
        ("0", "0.00", "0"),
        ("7", "0.10", "5e-05"),
        ("39", "0.54", "3.048e-05"),
        ("72", "1.00", "1e-05"),
    ]
    assert lines[-1][-1] == "annealing ends, run ends"


def test_epochs_are_resolved_where_records_are_counted(tmp_path):
    write_set(tmp_path, "text.train", [100, 188])
    raw = {**TINY, "epochs": 2, "data_dir": str(tmp_path)}
    del raw["total_steps"]
    assert "144 steps = 2.00 epochs of 288 sequences" in report(load_config(raw), 4)
    text = report(load_config({**raw, "data_dir": str(tmp_path / "absent")}), 4)
    assert re.search(r"learning rate +not known: epochs \(2\) needs the number of records", text)


def test_records_that_are_not_described_are_not_counted(tmp_path):
    write_set(tmp_path, "a", [3, 4])
    write_set(tmp_path, "b", [3, None])
    assert count_records(str(tmp_path / "a.index")) == 7
    assert count_records(str(tmp_path / "b.index")) is None
    assert count_records(str(tmp_path / "c.index")) is None
    assert "epochs are not known" in report(load_config(TINY))


def test_a_schedule_beyond_the_run_is_marked():
    text = report(load_config({**TINY, "anneal_steps": 100}))
    assert re.search(r" 107 .*annealing ends \(beyond the run\)", text)


def test_zero_warmup_and_anneal():
    text = report(load_config({**TINY, "warmup_steps": 0, "anneal_steps": 0}))
    assert re.search(r"^ +0 .*first update, warm-up ends, half annealed, annealing ends$", text, re.M)
    assert "nan" not in text


def test_the_guides_own_example_departs_from_nothing():
    config = load_config({**TINY, "weight_decay": 0.1})
    assert advice(config, 1) == []
    assert "warning" not in report(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 1e-4, "end_lr": 1e-5}, r"lr \(0.0001\) is outside 1e-5 to 5e-5"),
        ({"end_lr": 2e-5}, r"end_lr \(2e-05\) is outside lr/10 to lr/5 \(5e-06 to 1e-05\)"),
        ({"weight_decay": 0}, r"weight_decay \(0\) is not 0.1"),
        ({"warmup_steps": 20, "anneal_steps": 52}, r"warmup_steps \(20\) is 27.8% of total_steps"),
        ({"anneal_steps": 60}, r"anneal_steps \(60\) is not .* \(65\); the rest of the run stays at end_lr"),
        ({"anneal_steps": 70}, r"anneal_steps \(70\) is not .* \(65\); the run ends before annealing does"),
    ],
)
def test_departures_from_the_guide(change, words):
    found = advice(load_config({**TINY, **change}), 1)
    assert len(found) == 1 and re.search(words, found[0])


def test_default_schedule_departs_from_nothing_but_the_rate():
    for total in (1, 2, 10, 72, 1000):
        raw = {key: TINY[key] for key in TINY.keys() - {"warmup_steps", "anneal_steps", "end_lr"}}
        assert advice(load_config({**raw, "total_steps": total}), 1) == []


def test_validation_that_leaves_sequences_out(tmp_path):
    write_set(tmp_path, "text.val", [9])
    raw = {**TINY, "data_dir": str(tmp_path), "val_set": {"text": "text.val.index"}}
    assert advice(load_config({**raw, "val_batches": 5}), 1) == []
    found = advice(load_config({**raw, "val_batches": 2}), 2)
    assert found == ["val_batches (2) reads 8 of the 9 sequences of text; 3 batches of 4 read all"]


def test_sizes_for_people():
    assert size(1023) == "1023 B"
    assert size(1536) == "1.50 KiB (1,536 bytes)"
    assert size(2**40 * 2048) == "2048.00 TiB (2,251,799,813,685,248 bytes)"


def test_the_command_prints_or_says_every_problem_in_one_line(tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(TINY))
    bad.write_text(json.dumps({**TINY, "layer": 3, "seq": 0}))
    assert main([str(good), "--devices", "8"]) == 0
    assert "dp 2 x mp 4" in capsys.readouterr().out
    assert main([str(bad)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and [line.split()[:3] for line in err.splitlines()] == [
        ["error:", f"{bad}:", "layer"],
        ["error:", f"{bad}:", "seq"],
    ]
    for count in ("6", "0", "-4"):
        assert main([str(good), "--devices", count]) == 2
        assert re.fullmatch(rf"error: {count} devices .*\n", capsys.readouterr().err)
    assert main([str(tmp_path / "absent.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_as_people_type_it(tmp_path):
    """A config error shows before jax is imported, without a traceback."""
    bad = tmp_path / "bad.json"
    bad.write_text('{"val_set": "x.index"}')
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mesh_transformer.config", str(bad)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2 and done.stdout == ""
    assert len(lines) == 8 and all(line.startswith(f"error: {bad}: ") for line in lines), lines
    assert not re.search(r"\bjax\b", "\n".join(line for line in done.stderr.splitlines() if "import time" in line))


def test_the_documentation_lists_every_key():
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    for key in SPECS:
        assert f"| `{key}` |" in page, f"docs/config.md lacks {key}: python -m mesh_transformer.config --markdown"
    assert markdown() in page, (
        "docs/config.md is stale: put in what python -m mesh_transformer.config --markdown prints"
    )


def test_the_documented_rule_for_epochs():
    config = load_config({**{key: TINY[key] for key in TINY if key != "total_steps"}, "epochs": 3})
    assert resolve_epochs(config, 9, dp=1).run.total_steps == 7  # ceil(27 / 4), not 3 * ceil(9 / 4)
