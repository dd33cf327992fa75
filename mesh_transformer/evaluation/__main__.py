"""lm-evaluation-harness's own command, with this project's model class registered in it.

    python -m mesh_transformer.evaluation --model mesh_transformer --model_args config=F,ckpt=P --tasks hellaswag

The harness finds models of other packages only when they are imported first, which is all that happens here; every
option is the harness's own (`--help` lists them). `Source` in `opening` lists what --model_args takes.

    python -m mesh_transformer.evaluation register

makes the environment's own `lm_eval` know the model, as `lm_eval --model mesh_transformer ...`; `unregister` undoes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mesh_transformer.command_line import complain, log_lines
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from mesh_transformer.evaluation import plugin, tasks

        tasks.check_harness()
        if words == ["register"]:
            print(f"lm_eval --model {plugin.NAME} works in this environment now, by {plugin.register()}")
            return EXIT_DONE
        if words == ["unregister"]:
            print(f"{plugin.unregister()} is gone")
            return EXIT_DONE
    except MeshTransformerError as error:
        return complain(error)
    from lm_eval.__main__ import cli_evaluate

    if {"-h", "--help"} & set(words):
        sys.argv = ["lm_eval", "run", "--help"]
        cli_evaluate()
    from mesh_transformer.evaluation import harness  # noqa: F401  registers the model

    sys.argv = ["lm_eval", *words]
    with log_lines():
        try:
            cli_evaluate()
        except MeshTransformerError as error:
            return complain(error)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
