"""`ray start` of a node, without what keeps it from being there at once.

For its commands for services, jobs and state Ray imports what is installed of fastapi, pandas and aiohttp, which costs
every start of a node seconds; it does without them where their import fails. And left to choose the ports of its
agents, a node is not there before these, Python programs both, have started and chosen.
"""

from __future__ import annotations

import sys

from mesh_transformer.cluster.ports import free_ports

LEFT_OUT = (
    "ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli", "ray.dashboard.optional_deps"
)  # fmt: skip

AGENT_PORTS = (
    "--runtime-env-agent-port", "--dashboard-agent-grpc-port", "--metrics-export-port", "--dashboard-agent-listen-port"
)  # fmt: skip
ADDRESS = "--node-ip-address="


def main() -> None:
    for address in [word.removeprefix(ADDRESS) for word in sys.argv if word.startswith(ADDRESS)]:
        ports = free_ports(address, len(AGENT_PORTS))
        sys.argv += [f"{option}={port}" for option, port in zip(AGENT_PORTS, ports, strict=True)]
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
