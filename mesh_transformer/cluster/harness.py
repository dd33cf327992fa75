"""The evaluation harness on the hosts of a cluster: what eval_harness.py does with --tpu or --hosts-file."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from mesh_transformer import inference
from mesh_transformer.cluster import host_options, pod, ray_session
from mesh_transformer.cluster.pod_scorer import PodScorer
from mesh_transformer.cluster.worker import Inferring
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.evaluation import command
from mesh_transformer.evaluation.opening import Loaded

logger = logging.getLogger(__name__)


def evaluate(request: command.Request, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the tasks on the hosts that `options` name; returns what `report.document` says.

    Raises MeshTransformerError for what can be corrected, HostError where a host is lost.
    """
    ray_session.check_installed()
    with contextlib.ExitStack() as stack:

        def load(config: Config, step_dirs: Sequence[str], tokenizer: Tokenizer) -> Loaded:
            # Weights alone are whole on every replica.
            config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, zero_stage=0))
            hosts = host_options.hosts_of(options, config)
            started = stack.enter_context(pod.started(hosts, config, host_options.patience_of(options)))
            held = started.hold(config).held

            def read(*paths: str) -> Inferring:
                operation = f"loading {paths[0]}" if paths else "drawing random weights"
                found: Inferring = started.crew.call("infer", config, paths, operation=operation)[0]
                return found

            # One step after the other, so that all hosts read the same.
            found = inference.first_good(step_dirs, read)[0] if step_dirs else read()
            scorer = PodScorer(started.crew, held, config.model.seq, tokenizer)
            shape = {"dp": held.dp, "mp": held.mp}
            return Loaded(scorer, found.step_dir, found.compute_dtype, found.weights_dtype, shape, found.device)

        return command.evaluate(request, load)
