"""Ray's own command line, `ray start` above all, without the commands for services, jobs and state.

For those Ray imports what is installed of fastapi, pandas and aiohttp, which costs every start of a node seconds; it
does without them where their import fails.
"""

from __future__ import annotations

import sys

LEFT_OUT = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")


def main() -> None:
    for name in LEFT_OUT:
        sys.modules[name] = None  # type: ignore[assignment]  # what Python takes for "not installed"
    try:
        from ray.scripts.scripts import main as ray
    except ImportError:  # of a Ray that cannot do without
        for name in [name for name in sys.modules if name in LEFT_OUT or name.startswith("ray.scripts")]:
            del sys.modules[name]
        from ray.scripts.scripts import main as ray
    ray()


if __name__ == "__main__":
    main()
