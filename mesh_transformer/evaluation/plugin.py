"""Makes the harness's own command, `lm_eval`, know this project's model, where a user has asked for that.

The harness looks for no plug-ins. `python -m mesh_transformer.evaluation register` writes one line into the
environment's site-packages that imports this module whenever Python starts there; `unregister` removes it. So this
imports nothing heavy, and changes nothing until the harness loads its list of models.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from mesh_transformer.errors import EvaluationError

NAME = "mesh_transformer"
MODEL = "mesh_transformer.evaluation.harness:MeshTransformerLM"  # loaded on first use
MODELS = "lm_eval.models"  # the harness's own list
LINE = (
    "import importlib.util as u; "
    "u.find_spec('mesh_transformer') and __import__('mesh_transformer.evaluation.plugin').evaluation.plugin.install()\n"
)


def site_file(folder: str | None = None) -> Path:
    """The file that Python reads when it starts, in site-packages or in `folder`."""
    return Path(folder or sysconfig.get_path("purelib")) / "mesh_transformer_lm_eval.pth"


def register(folder: str | None = None) -> Path:
    """Write the file. Raises EvaluationError."""
    path = site_file(folder)
    try:
        path.write_text(LINE, encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"{path} cannot be written ({error.strerror}): use an environment of your own") from error
    return path


def unregister(folder: str | None = None) -> Path:
    """Remove the file, if it is there. Raises EvaluationError."""
    path = site_file(folder)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise EvaluationError(f"{path} cannot be removed ({error.strerror})") from error
    return path


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the harness's list of models, and adds one when it has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        if fullname != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def run(module: ModuleType) -> None:
                execute(module)
                from lm_eval.api.registry import model_registry

                if NAME not in model_registry:
                    model_registry.register(NAME, target=MODEL)

            setattr(spec.loader, "exec_module", run)  # noqa: B010  of this one loader
        return spec


def install() -> None:
    """From now on the harness knows the model as soon as it loads its own."""
    if MODELS not in sys.modules:
        sys.meta_path.insert(0, _Finder())
