"""An evaluator of a checkpoint, from what a command line says."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mesh_transformer import completion, inference
from mesh_transformer.checkpoint.identity import step_hash
from mesh_transformer.checkpoint.store import Which
from mesh_transformer.config import Config, load_config
from mesh_transformer.config_fields import nearest
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.errors import EvaluationError
from mesh_transformer.evaluation.answers import Answers
from mesh_transformer.evaluation.evaluator import Evaluator
from mesh_transformer.evaluation.requests import Encoder, TextOptions
from mesh_transformer.evaluation.scorer import NetworkScorer, Scorer
from mesh_transformer.mesh import DP, MP

AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Which weights, on which devices, and how texts are read; the names are those of `--model_args`.

    version: of the network; None is the config's.  batch_size: contexts of a batch, or `auto`.  answers: a file that
    keeps what has been scored.  add_bos_token: begin every context with the end-of-text token.  The rest is as in
    device_sample.py.
    """

    config: str
    version: int | None = None
    ckpt: str | None = None
    ckpt_step: Which = "latest"
    random_init: bool = False
    strict: bool = False
    platform: str | None = None
    devices: int | None = None
    batch_size: int | str = AUTO
    add_bos_token: bool = False
    ftfy: bool = False
    answers: str | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Source:
        """From `--model_args`. Raises EvaluationError for names and values that there are not."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in arguments:
            if name not in names:
                raise EvaluationError(f"model_args has {name}; the nearest that is known is {nearest(name, names)}")
        if not isinstance(arguments.get("config"), str):
            raise EvaluationError("model_args needs config=FILE, a JSON config")
        size = arguments.get("batch_size", AUTO)
        if str(size).isdigit():
            size = int(size)
        if size != AUTO and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise EvaluationError(f"batch_size ({size!r}) must be an integer of at least 1, or auto")
        if arguments.get("version") not in (None, 1, 2):
            raise EvaluationError(f"version ({arguments['version']!r}) must be 1 or 2")
        return cls(**{**arguments, "batch_size": size})


@dataclasses.dataclass(frozen=True)
class Opened:
    """An evaluator, and what results say about its model: JSON values."""

    evaluator: Evaluator
    about: Mapping[str, Any]
    answers: Answers


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model that scores, and what is said of it; `step_dir` None for random weights. mesh: its shape."""

    scorer: Scorer
    step_dir: str | None
    compute_dtype: str
    weights_dtype: str
    mesh: Mapping[str, int]
    device: str


# Makes the model of a config with the weights of the first good one of these steps (none: random ones).
Load = Callable[[Config, Sequence[str], Tokenizer], Loaded]


def load_here(source: Source) -> Load:
    """On this process's devices."""

    def load(config: Config, step_dirs: Sequence[str], tokenizer: Tokenizer) -> Loaded:
        mesh = inference.start_mesh(config, source.platform, source.devices)
        network, step_dir = inference.load_step(config, mesh, step_dirs)
        shape = {"dp": int(mesh.shape[DP]), "mp": int(mesh.shape[MP])}
        dtype = str(jax.tree.leaves(network.state.params)[0].dtype)
        kind = mesh.devices.flat[0].device_kind
        return Loaded(NetworkScorer(network, tokenizer), step_dir, str(network.model.compute_dtype), dtype, shape, kind)

    return load


def open_evaluator(source: Source, load: Load | None = None) -> Opened:
    """Loads weights and tokenizer, by `load` or on this process's devices.

    Raises MeshTransformerError for what the user can correct.
    """
    config = load_config(source.config, version=source.version)
    step_dirs = inference.choose_steps(config, source.ckpt, source.ckpt_step, source.random_init, source.strict)
    tokenizer = completion.tokenizer_of(config)
    if step_dirs:
        inference.check_tokenizer(step_dirs[0], config, tokenizer)
    encoder = Encoder(tokenizer, config.model.seq, TextOptions(source.ftfy, source.add_bos_token))
    loaded = (load or load_here(source))(config, step_dirs, tokenizer)
    step_dir = loaded.step_dir
    about = {
        "checkpoint": step_dir,
        "checkpoint_hash": step_hash(step_dir) if step_dir is not None else f"random weights, seed {config.run.seed}",
        "config": config.to_dict(),
        "config_file": source.config,
        "tokenizer_hash": tokenizer.hash,
        "compute_dtype": loaded.compute_dtype,
        "weights_dtype": loaded.weights_dtype,
        "mesh": dict(loaded.mesh),
        "device": loaded.device,
        "ftfy": source.ftfy,
        "add_bos_token": source.add_bos_token,
        "batch_size": source.batch_size,
    }
    depends = ("checkpoint_hash", "tokenizer_hash", "compute_dtype", "weights_dtype")
    answers = Answers(source.answers, {name: about[name] for name in depends} | {"model": _model(config.to_dict())})
    evaluator = Evaluator(
        loaded.scorer, encoder, answers=answers, progress=sys.stderr,
        rows=None if source.batch_size == AUTO else int(source.batch_size),
    )  # fmt: skip
    return Opened(evaluator, about, answers)


def _model(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The config keys that decide what the weights compute."""
    return {
        key: flat[key]
        for key in ("version", "layers", "d_model", "n_heads", "n_vocab", "seq", "pe", "norm", "pe_rotary_dims")
    }
