"""The harness's own Hugging Face backend, on exported weights, gives the same scores, accuracies and texts."""

import functools
import os

import pytest
from evaluation_tools import ROOT, TASKS, trained

pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `evaluation`)")
pytest.importorskip("torch", reason="torch is not installed (the extra `peers`)")
pytest.importorskip("accelerate", reason="accelerate is not installed (the extra `peers`)")

pytestmark = pytest.mark.slow

LIMITS = {"order": 30, "word": 60, "text": 2, "line": 32}
MESHES = [(1, 1), (1, 4)]


@functools.cache
def loaded():
    from mesh_transformer.evaluation import tasks

    before = os.getcwd()
    os.chdir(ROOT)  # the example tasks name their data from there
    try:
        return tasks.load([tasks.Spec(name) for name in TASKS.values()])
    finally:
        os.chdir(before)


def evaluated(model):
    """{task: results} of the harness, with what it asked and was answered."""
    from mesh_transformer.evaluation import tasks

    found = {}
    for task in loaded():
        results = tasks.run(model, [task], limit=LIMITS[task.task_name.removeprefix("python_")], samples=True)
        samples = sorted(results["samples"][task.task_name], key=lambda sample: sample["doc_id"])
        answers = [(sample["arguments"], sample["resps"]) for sample in samples]
        found[task.task_name] = results["results"][task.task_name], answers
    return found


@functools.cache
def theirs():
    from lm_eval.models.huggingface import HFLM

    from mesh_transformer import load_config
    from mesh_transformer.checkpoint.huggingface import convert

    model = trained()
    out = model.folder / "hf"
    convert(model.step_dir, load_config(model.config), out, dtype="fp32")
    return evaluated(HFLM(pretrained=str(out), device="cpu", dtype="float32", batch_size=16))


@functools.cache
def ours(dp, mp):
    from mesh_transformer.evaluation.evaluator import Evaluator
    from mesh_transformer.evaluation.harness import MeshTransformerLM
    from mesh_transformer.evaluation.requests import Encoder, TextOptions
    from mesh_transformer.evaluation.scorer import NetworkScorer

    model = trained()
    net = model.network(dp, mp)
    encoder = Encoder(model.tokenizer, net.model.seq, TextOptions())
    return evaluated(MeshTransformerLM(Evaluator(NetworkScorer(net, model.tokenizer), encoder)))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("task", ["python_order", "python_word", "python_text"])
def test_likelihoods_are_those_of_hugging_face(task, mesh):
    mine, peer = ours(*mesh)[task][1], theirs()[task][1]
    assert len(mine) == len(peer) == LIMITS[task.removeprefix("python_")]
    for (asked, found), (asked_too, wanted) in zip(mine, peer, strict=True):
        assert asked == asked_too
        for one, other in zip(found, wanted, strict=True):
            one, other = one[0], other[0]
            if task != "python_text":
                assert one[1] == other[1]  # whether greedy
                one, other = one[0], other[0]
            assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("task", "metric", "chance"), [("order", "acc", 0.25), ("word", "acc", 0.01)])
def test_accuracies_are_identical_and_above_chance(task, metric, chance, mesh):
    (mine, _), (peer, _) = ours(*mesh)[f"python_{task}"], theirs()[f"python_{task}"]
    assert mine[f"{metric},none"] == peer[f"{metric},none"] > 2 * chance


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_generated_texts_are_those_of_hugging_face(mesh):
    (mine, answers), (peer, wanted) = ours(*mesh)["python_line"], theirs()["python_line"]
    assert answers == wanted
    assert len({str(found) for _, found in answers}) > 5, "an answer that is always the same would be no test"
    assert mine["exact_match,none"] == peer["exact_match,none"] > 0
    assert not any("\n" in text for _, ((text,),) in answers)
