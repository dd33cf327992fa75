"""Will it fit, and how fast will it go: plan the training of a config on a TPU slice, before renting it.

    python scripts/plan.py --config configs/6B_roto_256.json --topology v3-8
    python scripts/plan.py --config F --topology v5e:2x4 --remat full

The very step that trains is compiled for the slice, on this machine, which needs no TPU (but the extra `plan`, which
brings the compiler), and its memory, arithmetic and traffic are read from the program. docs/planning.md tells the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_transformer.command_line import complain
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError

REMATS = ("none", "dots", "full")
EXIT_TOO_LARGE = 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="JSON config, a path or URL")
    parser.add_argument(
        "--topology", required=True, metavar="NAME", help="such as v3-8, v4-32, v5e-16, v5e:4x8, v6e-8, v5p-64"
    )
    parser.add_argument(
        "--remat", choices=REMATS, help="what the backward pass recomputes (the config's; auto tries dots, then full)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from mesh_transformer.config import load_config
    from mesh_transformer.planning import chips, exact, report

    try:
        config, topology = load_config(options.config), chips.topology(options.topology)
        chosen = options.remat or config.model.remat
        for remat in ("dots", "full") if chosen == "auto" else (chosen,):
            try:
                estimate = exact.exact(config, topology, remat)
            except exact.TooLargeError as error:
                print(f"remat {remat}: does not fit {topology}: {error}")
                continue
            print(report.text(config, topology, remat, estimate), end="")
            return EXIT_DONE
        print(report.advice(config, topology))
        return EXIT_TOO_LARGE
    except MeshTransformerError as error:
        return complain(error)


if __name__ == "__main__":
    sys.exit(main())
