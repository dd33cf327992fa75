"""How a TPU's hosts are reached: whose key, which addresses, and which host keys are believed.

For each TPU this machine keeps a folder, `~/.mesh-transformer/tpus/PROJECT/ZONE/NAME` (MESH_TRANSFORMER_HOME moves it).
In it `nonce` says which node was made from here, and `known_hosts-NONCE` holds that node's host keys. Keys that the
hosts reported to the Cloud API are believed; else, of a node made from here, the first that it shows; else none.
"""

from __future__ import annotations

import dataclasses
import getpass
import os
import shlex
import subprocess
from pathlib import Path

from mesh_transformer.cluster import tpu_nodes
from mesh_transformer.cluster.ssh import FOLDER, Machine
from mesh_transformer.cluster.tpu_api import Body, TPUApi, TPUError
from mesh_transformer.errors import ConfigError

HOME_VARIABLE = "MESH_TRANSFORMER_HOME"
GCLOUD_KEY = "~/.ssh/google_compute_engine"


@dataclasses.dataclass(frozen=True)
class Login:
    """How to log in. `user`, `key`: None for what is usual; `external`: by public addresses, from outside the network;
    `python`: an interpreter on the hosts that has everything; `dry`: nothing is written here either."""

    user: str | None = None
    key: str | None = None
    port: int = 22
    external: bool = False
    folder: str = FOLDER
    python: str | None = None
    dry: bool = False


def home() -> Path:
    """This machine's own folder of the project."""
    return Path(os.environ.get(HOME_VARIABLE) or f"~/{FOLDER}").expanduser()


def make_private(folder: Path) -> Path:
    """Makes a folder that nobody else can read."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


class Trust:
    """What this machine remembers of one TPU."""

    def __init__(self, api: TPUApi, name: str, dry: bool = False) -> None:
        self.folder = home() / "tpus" / api.project.replace(":", "_") / api.zone / name
        self.name, self.dry = name, dry

    @property
    def nonce(self) -> str:
        """The label of the node that was last made from here; '' if none was."""
        file = self.folder / "nonce"
        return file.read_text().strip() if file.exists() else ""

    def begin(self) -> str:
        """A node is about to be made: its label. What was known of the one before is dropped."""
        if self.dry:
            return "LABEL"
        nonce = tpu_nodes.new_nonce()
        make_private(self.folder)
        (self.folder / "nonce").write_text(nonce + "\n")
        for old in self.folder.glob("known_hosts*"):
            old.unlink()
        return nonce

    def forget(self) -> None:
        """The node is gone."""
        if self.dry:
            return
        for file in ("nonce", *(path.name for path in self.folder.glob("known_hosts*"))):
            (self.folder / file).unlink(missing_ok=True)

    def alias(self, host: int) -> str:
        """What the known-hosts file calls a host: its address may be another machine's tomorrow."""
        return f"tpu-{self.name}-{host}"

    def file(self, node: Body) -> Path:
        """The known-hosts file of this very node."""
        label = str((node.get("labels") or {}).get(tpu_nodes.LABEL) or node.get("id") or "unlabelled")
        return self.folder / f"known_hosts-{label}"

    def made_here(self, node: Body) -> bool:
        return bool(self.nonce) and (node.get("labels") or {}).get(tpu_nodes.LABEL) == self.nonce

    def known(self, node: Body) -> set[str]:
        """The hosts whose keys are known."""
        file = self.file(node)
        return {line.split()[0] for line in file.read_text().splitlines() if line.strip()} if file.exists() else set()


def machines(api: TPUApi, name: str, node: Body, login: Login) -> list[Machine]:
    """The node's hosts, in order, ready for ssh. Raises TPUError where their host keys cannot be known."""
    trust = Trust(api, name, login.dry)
    hosts = tpu_nodes.endpoints(node)
    aliases = [trust.alias(number) for number in range(len(hosts))]
    known = trust.known(node)
    if not known.issuperset(aliases):
        _learn(api, trust, node, aliases)
        known = trust.known(node)
    file, here = trust.file(node), trust.made_here(node) or trust.dry
    if not here and not known.issuperset(aliases):
        raise TPUError(
            f"TPU {name} was not made from this machine, and its host keys are not known: its image does not "
            f"report them. Write them into {file}, each line `{aliases[0]} ssh-ed25519 AAAA...`, or delete it and "
            "make it again"
        )
    if trust.made_here(node) and not trust.dry:
        make_private(trust.folder)
    user, key = user_of(login), key_of(login, here)
    found = []
    for alias, host in zip(aliases, hosts, strict=True):
        address = host.external if login.external else host.internal
        if address is None:
            raise TPUError(f"TPU {name} has no public addresses: run this in its network, without --external-ip")
        found.append(Machine(
            address, host.internal, user, login.port, key, str(file), alias, accept_new=alias not in known,
            folder=login.folder, python=login.python,
        ))  # fmt: skip
    return found


def _learn(api: TPUApi, trust: Trust, node: Body, aliases: list[str]) -> None:
    """Writes down what the hosts report to the API, an authenticated way past the network between."""
    reported = tpu_nodes.host_keys(api, trust.name, len(aliases))
    if all(reported) and not trust.dry:
        make_private(trust.folder)
        lines = [f"{alias} {key}\n" for alias, keys in zip(aliases, reported, strict=True) for key in keys]
        trust.file(node).write_text("".join(lines))


def user_of(login: Login) -> str:
    """The user on the hosts: the one here, but for root, whom the images do not let in."""
    if login.user:
        return login.user
    here = getpass.getuser()
    return "mesh" if here == "root" else here


def key_of(login: Login, made_here: bool) -> str:
    """The private key's file; made on first use. For a TPU made elsewhere, gcloud's key where there is one."""
    if login.key:
        path = Path(login.key).expanduser()
        if not path.is_file():
            raise ConfigError(f"--ssh-key {login.key} does not exist: ssh-keygen -t ed25519 -f {login.key}")
        return str(path)
    gcloud = Path(GCLOUD_KEY).expanduser()
    if not made_here and gcloud.is_file():
        return str(gcloud)
    path = home() / "id_ed25519"
    if not path.exists() and not login.dry:
        make_private(path.parent)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "mesh-transformer", "-f", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(
                f"no key to log in with ({shlex.join(command)}: {error}): give one by --ssh-key"
            ) from error
    return str(path)


def metadata(login: Login) -> tuple[tuple[str, str], ...]:
    """What a new node is told, so that it lets this machine in and reports its host keys."""
    public, user = Path(key_of(login, True) + ".pub"), user_of(login)
    if login.dry and not public.exists():
        return (("enable-guest-attributes", "TRUE"), ("ssh-keys", f"{user}:(the public key in {public}) {user}"))
    if not public.is_file():
        raise ConfigError(f"{public} does not exist: ssh-keygen -y -f {public.with_suffix('')} > {public}")
    kind, text = public.read_text().split()[:2]
    return (("enable-guest-attributes", "TRUE"), ("ssh-keys", f"{user}:{kind} {text} {user}"))
