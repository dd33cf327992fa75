"""The learning rate of a config at the steps where it turns, in steps and epochs.

    python scripts/show_schedule.py configs/quickstart.json --devices 8

Update number n (from 1) uses the rate of n - 1 completed updates, so with any warm-up the first one has rate 0. After
warmup_steps + anneal_steps the rate stays at end_lr. Fine-tuning begins at step 0 of this schedule, resuming goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_transformer.command_line import complain
from mesh_transformer.config import check_mesh, load_config, resolve_epochs
from mesh_transformer.config_records import count_records
from mesh_transformer.config_report import schedule_lines
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="JSON config, a path or URL")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices of the run, for epochs (default: tpu_size, or one replica)"
    )
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config)
        devices = options.devices or config.mesh.tpu_size or config.mesh.cores_per_replica
        dp, _ = check_mesh(config, devices)
        records = count_records(config.data.train_path)
        if records:
            config = resolve_epochs(config, records, dp)
        print("\n".join(schedule_lines(config, dp, records)))
    except MeshTransformerError as error:
        return complain(error)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
