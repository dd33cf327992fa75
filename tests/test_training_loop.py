"""The loop by itself: what it does after which step, with an executor that computes in numpy."""

import json
import logging
import math
import signal
import time

import numpy as np
import pytest

from mesh_transformer.config import load_config
from mesh_transformer.errors import ConfigError, DataError, NonFiniteError, StorageError
from mesh_transformer.training.loop import Ending, Hardware, TrainingLoop
from mesh_transformer.training.periods import is_due
from mesh_transformer.training.run_state import RunState
from mesh_transformer.training.signals import StopRequest
from mesh_transformer.training.validation import Validation
from mesh_transformer.training.watchdog import Watchdog

A, B, S = 2, 4, 8


class Numbers:
    """Batches 0, 1, 2, ... as data; `bad` ones make the executor report a gradient that is not finite."""

    def __init__(self, position=0, end=10**6):
        self.next, self.end = position, end

    @property
    def position(self):
        return {"next": self.next}

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.end:
            raise StopIteration
        self.next += 1
        return {"obs": np.full((A, B, S), self.next - 1), "target": np.full((A, B, S), self.next - 1)}


class Descent:
    """Gradient descent on one weight: every batch's number moves it, so order and position show in the loss."""

    def __init__(self, weight=1.0, bad=(), on_step=None, disk_full_at=None):
        self.weight, self.bad, self.on_step = weight, set(bad), on_step
        self.disk_full_at = disk_full_at
        self.events, self.saves = [], []

    def train(self, batch):
        number = int(batch["obs"].flat[0])
        self.events.append(("dispatched", number))
        skipped = number in self.bad
        loss = self.weight**2 + 1e-3 * number
        if not skipped:
            self.weight -= 0.1 * (2 * self.weight + 1e-3 * number)
        if self.on_step is not None:
            self.on_step(number)

        def read():
            self.events.append(("read", number))
            return {
                "loss": loss + 0.5, "last_loss": loss, "cross_entropy": loss, "z_loss": 0.5, "learning_rate": 0.1,
                "grad_norm": math.nan if skipped else 1.0 + 0.01 * number, "noise_small_sq": 0.75,
                "skipped": float(skipped),
            }  # fmt: skip

        return read

    def evaluate(self, batch):
        self.events.append(("evaluated", len(self.saves)))
        return lambda: np.full(batch["obs"].shape, self.weight, np.float32)

    def save(self, run, position, val_loss):
        if run.step == self.disk_full_at:
            raise StorageError("disk full")
        self.saves.append((run, dict(position), dict(val_loss), self.weight))

    def wait(self):
        pass

    def last_saved(self):
        return f"step_{self.saves[-1][0].step}" if self.saves else None

    @property
    def saved_steps(self):
        return [run.step for run, *_ in self.saves]


class Lines:
    """A tracker in memory."""

    def __init__(self):
        self.lines = []

    def log(self, step, metrics):
        self.lines.append((step, dict(metrics)))

    def flush(self):
        pass

    @property
    def steps(self):
        return [step for step, _ in self.lines]


def config_of(**keys):
    return load_config(
        {
            "layers": 1, "d_model": 8, "n_heads": 1, "n_vocab": 16, "seq": S, "per_replica_batch": 2,
            "gradient_accumulation_steps": A, "lr": 0.1, "train_set": "x", "model_dir": "m", "total_steps": 10, **keys,
        }
    )  # fmt: skip


def train(
    executor, data=None, run=None, saved=False, tracker=None, stop=None, validation=None, clock=time.monotonic,
    watchdog_seconds=60.0, **keys
):  # fmt: skip
    data, run = data or Numbers(), run or RunState("r")
    with Watchdog(watchdog_seconds) as watchdog, stop or StopRequest() as entered:
        loop = TrainingLoop(
            config_of(**keys), executor, data, run, saved=saved, hardware=Hardware("cpu", 1), stop=entered,
            watchdog=watchdog, validation=validation, trackers=[tracker] if tracker else [], clock=clock,
        )  # fmt: skip
        return loop.run(), loop.run_state


def val_batches(count):
    return lambda: [{"obs": np.zeros((B, S)), "target": np.zeros((B, S))}] * count


@pytest.mark.parametrize(
    ("every", "total", "expected"),
    [(1, 4, [1, 2, 3, 4]), (3, 10, [3, 6, 9, 10]), (5, 10, [5, 10]), (20, 10, [10]), (0, 10, []), (None, 10, [])],
)
def test_periodic_work_is_due_after_multiples_and_after_the_last_step(every, total, expected):
    assert [step for step in range(total + 1) if is_due(every, step, total)] == expected


@pytest.mark.parametrize(
    ("every", "expected"), [(1, list(range(1, 11))), (3, [3, 6, 9, 10]), (5, [5, 10]), (0, [10]), (None, [10])]
)
def test_saves_fire_by_period_and_the_last_step_is_saved_once(every, expected):
    executor = Descent()
    ending, run = train(executor, ckpt_every=every)
    assert ending is Ending.DONE and run.step == 10
    assert executor.saved_steps == expected


@pytest.mark.parametrize(("every", "expected"), [(1, 10), (3, 4), (5, 2), (0, 0), (None, 0)])
def test_validations_fire_by_period(every, expected):
    executor, tracker = Descent(), Lines()
    train(executor, tracker=tracker, validation=Validation({"v": val_batches(1)}), val_every=every)
    assert sum("val/loss_v" in metrics for _, metrics in tracker.lines) == expected
    assert tracker.steps == list(range(1, 11)), "one line per step, validation or not"


def test_numbers_are_read_one_step_late_and_hooks_see_the_exact_step():
    executor = Descent()
    train(executor, ckpt_every=3, total_steps=4)
    dispatched_before_read = [e for e in executor.events if e[0] in ("dispatched", "read")]
    # 0 is read only after 1 runs; the save after update 3 (batch 2) waits for it, and nothing is in flight then.
    assert dispatched_before_read == [
        ("dispatched", 0), ("dispatched", 1), ("read", 0), ("dispatched", 2), ("read", 1), ("read", 2),
        ("dispatched", 3), ("read", 3),
    ]  # fmt: skip
    assert [position for _, position, _, _ in executor.saves] == [{"next": 3}, {"next": 4}]


def test_validation_comes_before_the_save_of_its_step_and_judges_it():
    executor = Descent()
    train(executor, validation=Validation({"v": val_batches(2)}), val_every=5, ckpt_every=5)
    assert [list(val_loss) for _, _, val_loss, _ in executor.saves] == [["v"], ["v"]]
    assert executor.saves[0][2]["v"] == pytest.approx(executor.saves[0][3])


def test_a_set_without_batches_is_left_out_with_one_warning(caplog):
    tracker = Lines()
    validation = Validation({"empty": val_batches(0), "small": val_batches(2)})
    with caplog.at_level(logging.WARNING):
        train(Descent(), tracker=tracker, validation=validation, val_every=2)
    assert caplog.text.count("val_set empty gave no batch") == 1
    assert not any("val/loss_empty" in metrics for _, metrics in tracker.lines)
    assert all(metrics["val/sequences_small"] == 2 * B for step, metrics in tracker.lines if step % 2 == 0)


def test_rows_that_only_fill_a_batch_do_not_count():
    class Ramp(Descent):
        def evaluate(self, batch):
            return lambda: np.arange(B, dtype=np.float32)[:, None] * np.ones((B, S), np.float32)

    batch = {"obs": np.zeros((B, S)), "target": np.zeros((B, S)), "real": np.array([1, 1, 0, 0], np.float32)}
    with Watchdog() as watchdog:
        result = Validation({"v": lambda: [batch]}).run(Ramp(), watchdog, StopRequest())["v"]
    assert (result.loss, result.sequences) == (0.5, 2)


def test_stop_and_resume_equals_straight(tmp_path):
    straight, lines = Descent(bad={1}), Lines()
    train(straight, tracker=lines)
    first, resumed = Descent(bad={1}), Lines()
    train(first, total_steps=4)
    run, position, _, weight = first.saves[-1]
    second = Descent(weight, bad={1})
    run = RunState.from_json(json.loads(json.dumps(run.to_json())))
    _, end = train(second, Numbers(position["next"]), run, saved=True, tracker=resumed)
    assert resumed.steps == [5, 6, 7, 8, 9, 10]
    timed = ("step_seconds", "per_sec")

    def untimed(rows):
        return [(s, {k: v for k, v in m.items() if not k.endswith(timed)}) for s, m in rows]

    assert untimed(resumed.lines) == untimed(lines.lines[4:])
    assert second.weight == straight.weight
    assert (end.sequences, end.tokens, end.skipped) == (11 * A * B, 11 * A * B * S, 1)


def test_a_finished_run_takes_no_step_and_saves_nothing():
    for total in (10, 7):
        executor = Descent()
        ending, run = train(executor, run=RunState("r", step=10), saved=True, total_steps=total)
        assert ending is Ending.DONE and run.step == 10
        assert executor.events == [] and executor.saves == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_step_three_saves_step_three(number):
    executor = Descent(on_step=lambda n: signal.raise_signal(number) if n == 2 else None)
    ending, run = train(executor, ckpt_every=5)
    assert ending is Ending.INTERRUPTED and run.step == 3
    assert executor.saved_steps == [3]


def test_a_signal_on_a_saved_step_saves_it_once():
    executor = Descent(on_step=lambda n: signal.raise_signal(signal.SIGTERM) if n == 2 else None)
    train(executor, ckpt_every=3)
    assert executor.saved_steps == [3]


def test_a_stop_before_the_first_step_saves_nothing():
    stop = StopRequest()
    stop.request("SIGTERM")
    executor = Descent()
    assert train(executor, stop=stop)[0] is Ending.INTERRUPTED
    assert executor.saves == [] and executor.events == []


def test_a_second_interrupt_stops_at_once_and_handlers_are_given_back():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_skipped_batches_move_the_data_but_not_the_step():
    executor, tracker = Descent(bad={2, 3}), Lines()
    _, run = train(executor, tracker=tracker, max_skipped=3, ckpt_every=2)
    assert run.step == 10 and run.skipped == 2 and run.sequences == 12 * A * B
    assert tracker.steps == list(range(1, 11))
    assert [metrics["skipped"] for _, metrics in tracker.lines] == [0, 0, 2, 2, 2, 2, 2, 2, 2, 2]
    # The save of step 2 was before the bad batches, that of step 4 behind them.
    assert [position["next"] for _, position, _, _ in executor.saves] == [2, 6, 8, 10, 12]


def test_too_many_skips_in_a_row_end_the_run_and_name_the_last_good_checkpoint():
    with pytest.raises(NonFiniteError, match=r"3 batches in a row .* last good checkpoint is step_4"):
        train(Descent(bad=range(5, 10)), max_skipped=3, ckpt_every=2)
    # Update 5 took the sequences 5 * A * B + 1 and on: which data to look at.
    with pytest.raises(NonFiniteError, match=rf"sequences {5 * A * B + 1} to {8 * A * B} of the run"):
        train(Descent(bad=range(5, 10)), max_skipped=3, ckpt_every=2)
    with pytest.raises(NonFiniteError, match="no checkpoint had been saved yet"):
        train(Descent(bad=range(10)), max_skipped=3, ckpt_every=2)


def test_skips_that_are_not_in_a_row_do_not_end_the_run():
    _, run = train(Descent(bad={1, 3, 5, 6, 8}), max_skipped=3)
    assert run.skipped == 5


def test_what_saving_meets_ends_the_run():
    with pytest.raises(StorageError, match="disk full"):
        train(Descent(disk_full_at=4), ckpt_every=2)


def test_data_that_end_early_say_so():
    with pytest.raises(DataError, match="ended after 24 sequences at step 3 of 10"):
        train(Descent(), Numbers(end=3))


def test_epochs_have_to_be_resolved_before():
    with pytest.raises(ConfigError, match="total_steps is not known yet"):
        train(Descent(), total_steps=None, epochs=2)


def test_the_time_of_a_step_has_the_wait_for_its_data_and_not_the_hooks():
    now = [0.0]

    class Slow(Numbers):
        def __next__(self):
            now[0] += 2.0
            return super().__next__()

    class Timed(Descent):
        def evaluate(self, batch):
            now[0] += 100.0
            return super().evaluate(batch)

        def save(self, *arguments):
            now[0] += 100.0
            super().save(*arguments)

    tracker = Lines()
    train(
        Timed(), Slow(), tracker=tracker, validation=Validation({"v": val_batches(1)}), clock=lambda: now[0],
        val_every=1, ckpt_every=1, total_steps=6,
    )  # fmt: skip
    assert [metrics["train/step_seconds"] for _, metrics in tracker.lines] == [2.0] * 6


def test_logging_period():
    tracker = Lines()
    train(Descent(), tracker=tracker, validation=Validation({"v": val_batches(1)}), log_every=4, val_every=3)
    assert tracker.steps == [3, 4, 6, 8, 9, 10]


def test_metrics_of_a_step_have_the_names_of_the_original():
    tracker = Lines()
    train(Descent(), tracker=tracker, total_steps=1)
    ((step, metrics),) = tracker.lines
    assert step == 1
    assert metrics["train/grad_norm"] == 1.0 / A
    assert metrics["train/cross_entropy"] + metrics["train/z_loss"] == metrics["train/loss"]
    assert metrics["tokens_processed"] == A * B * S and metrics["sequences_processed"] == A * B
    assert metrics["train/tokens_per_sec"] == pytest.approx(A * B * S * metrics["train/steps_per_sec"])
    # Small batch 2, large 8; squared norms 0.75 and 0.25.
    assert metrics["noise/G_noise"] == pytest.approx((8 * 0.25 - 2 * 0.75) / 6)
    assert metrics["noise/S_noise"] == pytest.approx(0.5 / (1 / 2 - 1 / 8))
    assert metrics["noise/B_simple"] == pytest.approx(metrics["noise/S_noise_avg"] / metrics["noise/G_noise_avg"])
    assert "train/mfu" not in metrics, "no peak is known for a CPU"


def test_a_tracker_that_hangs_is_named_by_the_watchdog(caplog):
    """As an upload to a bucket that has become unreachable does, for minutes."""
    tracker = Lines()
    tracker.flush = lambda: time.sleep(0.3)
    train(Descent(), tracker=tracker, total_steps=1, ckpt_every=0, watchdog_seconds=0.1)
    assert "still writing metrics after" in caplog.text
