"""How many calls a step costs the driver of a pod, and that each update's numbers are its own; without Ray."""

import collections
from concurrent.futures import Future

import numpy as np
import pytest

from mesh_transformer.cluster.crew import Pending
from mesh_transformer.cluster.hosts import Host, HostError
from mesh_transformer.cluster.pod_executor import Deadline, Parts, PodExecutor
from mesh_transformer.cluster.worker import Held

HELD = Held(dp=2, mp=1, replicas=((0,), (1,)), parameters=1)


class Calls:
    """Two hosts that do as `worker.Worker` does: what is started waits in line until a call asks for the oldest."""

    def __init__(self, differing=None):
        self.hosts = [Host("a", "10.0.0.1", 1, "cpu"), Host("b", "10.0.0.2", 1, "cpu")]
        self.made, self.ended, self.differing = [], False, differing
        self._lines = [collections.deque() for _ in self.hosts]
        self._updates = 0

    def submit(self, method, *arguments, operation, each):
        self.made.append(method)
        self._updates += method == "train"
        gives = []
        for host, line in enumerate(self._lines):
            asked = arguments[0] if method == "train" else each[host]
            if method == "train":
                line.append({"loss": float(self._updates + host * (self._updates == self.differing))})
            gives.append(line.popleft() if asked else None)
        return Pending(tuple(gives), operation)

    def results(self, pending, seconds):
        return list(pending.refs)

    def end(self):
        self.ended = True


@pytest.fixture
def executor():
    return lambda calls: PodExecutor(calls, HELD, Deadline(None), None, None, {}, lambda: None)


def rows():
    sent = Future()
    sent.set_result(["rows of a", "rows of b"])
    return Parts({"obs": np.zeros((1, 2, 4))}, sent, {})


def in_a_row(executor, count):
    """The numbers of each, read while the next one computes."""
    found, behind = [], executor.train(rows())
    for _ in range(count - 1):
        ahead = executor.train(rows())
        found.append(behind())
        behind = ahead
    return [*found, behind()]


def test_a_step_is_one_call_that_brings_the_numbers_of_the_one_before(executor):
    calls = Calls()
    training = executor(calls)
    assert [numbers["loss"] for numbers in in_a_row(training, 4)] == [1, 2, 3, 4]
    assert calls.made == ["train"] * 4 + ["result"]
    # And again behind a break, such as a validation.
    assert [numbers["loss"] for numbers in in_a_row(training, 2)] == [5, 6]
    assert calls.made[5:] == ["train", "train", "result"]


def test_hosts_that_differ_end_the_run(executor):
    calls = Calls(differing=2)
    with pytest.raises(HostError, match=r"while training \(update 2 .*: b \(10\.0\.0\.2\) computed .*3\.0.* a .*2\.0"):
        in_a_row(executor(calls), 3)
    assert calls.ended
