"""Eight simulated devices, strict modes, and what tests share: tiny configs, meshes, compiled networks.

JAX's settings are made here, before anything starts it. Compiles dominate the time of these tests, so executables go
to a cache folder that also the subprocesses of one test run share, and no time is spent on making them fast: LLVM
optimizes little, and XLA writes fusions by its older emitters, if it has them, which takes a third of the time.
Collectives and buffers are those of any other run; `make test-long` compiles all as users' runs do, and so does
`XLA_FLAGS= make test`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import tempfile
from collections.abc import Iterator
from typing import Any

_cache = os.environ.get("MESH_TRANSFORMER_TEST_CACHE") or tempfile.mkdtemp(prefix="mesh-transformer-xla-")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
_flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _flags += " --xla_cpu_use_fusion_emitters=false"  # later ones have one kind of emitters, and refuse the flag
os.environ.setdefault("XLA_FLAGS", _flags)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = os.path.join(_cache, "datasets")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

TINY: dict[str, Any] = {
    "layers": 2, "d_model": 32, "n_heads": 8, "n_vocab": 64, "seq": 16, "pe_rotary_dims": 4,
    "cores_per_replica": 1, "per_replica_batch": 1, "gradient_accumulation_steps": 1,
    "lr": 1e-2, "end_lr": 1e-3, "warmup_steps": 0, "anneal_steps": 20, "weight_decay": 0.1,
    "total_steps": 20, "train_set": "none.index", "name": "tiny", "model_dir": "tiny",
    "compute_dtype": "float32", "seed": 1,
}  # fmt: skip


def tiny(**changes: Any) -> dict[str, Any]:
    """A config of a model that compiles in about a second."""
    return {**TINY, **changes}


@functools.lru_cache(maxsize=32)
def mesh_of(dp: int, mp: int) -> jax.sharding.Mesh:
    """A (dp, mp) mesh of the first dp * mp simulated devices."""
    from mesh_transformer.mesh import DP, MP

    return jax.sharding.Mesh(np.asarray(jax.devices()[: dp * mp]).reshape(dp, mp), (DP, MP))


def network_of(dp: int, mp: int, **changes: Any) -> Any:
    """A fresh CausalTransformer of the tiny config on a (dp, mp) mesh; compiled steps are shared by equal settings."""
    from mesh_transformer import CausalTransformer, load_config

    return CausalTransformer(load_config(tiny(cores_per_replica=mp, **changes)), mesh_of(dp, mp))


def tokens_of(*shape: int, vocab: int = 64, seed: int = 0) -> np.ndarray:
    """Random token ids, int32."""
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


def batch_of(*shape: int, vocab: int = 64, seed: int = 0) -> dict[str, np.ndarray]:
    """{"obs", "target"} of random ids, one token apart, with leading dims `shape` = (..., S)."""
    tokens = tokens_of(*shape[:-1], shape[-1] + 1, vocab=vocab, seed=seed)
    return {"obs": tokens[..., :-1], "target": tokens[..., 1:]}


@pytest.fixture(scope="module")
def uncached() -> Iterator[None]:
    """For modules whose programs have several independent collectives: nothing that they or their subprocesses compile
    goes to the cache. On several CPU devices XLA runs a program that it read from there without the order of its
    collectives, which then can wait for each other.
    """
    name = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    before = os.environ[name]
    os.environ[name] = "1e9"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    os.environ[name] = before
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(before))


@pytest.fixture(scope="session")
def golden_dir() -> str:
    """The parts of the 2021 library's measured data that tests copy."""
    return os.path.join(os.path.dirname(__file__), "data", "golden")


@pytest.fixture(scope="session")
def training_data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of `training_tools.make_data`; tests may add files to it, under names of their own."""
    from training_tools import make_data

    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def straight(training_data: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of `training_tools.straight_run`, which tests compare with, copy, and leave as it is."""
    from training_tools import straight_run

    return straight_run(tmp_path_factory.mktemp("straight"), training_data)


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The config of a tiny model that can be served."""
    from serving_tools import make_model

    return make_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def server(served_model: Any) -> Any:
    """One real server process for all tests that leave it as it was."""
    from serving_tools import serving

    with serving(served_model) as running:
        yield running
