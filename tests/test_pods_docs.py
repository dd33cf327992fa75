"""The commands of docs/pods.md, in their order, against a cloud of this machine; those that train show what they do.

What needs Google itself (gcloud) and what the page's reader installs is not run here.
"""

import importlib.util
import json
import re
import sys

import pytest
from conftest import tiny
from fake_tpu_api import FakeTPU
from ssh_tools import ssh_hosts
from test_repository import ROOT, commands

import train
from mesh_transformer.cluster import tpu_machines
from scripts import tpu

pytest.importorskip("google.auth", reason="needs google-auth")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
PAGE = ROOT / "docs/pods.md"


def with_login(words, login):
    """Options in front of what stands behind --."""
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at], *login, *words[at:]]


def test_every_command_of_the_page_does_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.json").write_text(json.dumps(tiny()))
    (tmp_path / "F").write_text(json.dumps(tiny()))
    monkeypatch.setattr(tpu.os, "execvp", lambda program, words: (_ for _ in ()).throw(SystemExit(0)))
    ran = []
    with ssh_hosts() as hosts:
        (tmp_path / "hosts").write_text(hosts.hosts_file(f"python={sys.executable}").read_text())
        cloud = FakeTPU(hosts=[host.address for host in hosts.hosts])
        cloud.ready_after = 1
        for name, value in cloud.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(tpu_machines.HOME_VARIABLE, str(tmp_path / "mine"))
        login = ["--ssh-user", hosts.user, "--ssh-key", str(hosts.key), "--ssh-port", str(hosts.port)]
        try:
            for words in commands(PAGE):
                if words[:2] == ["python", "scripts/tpu.py"]:
                    arguments = words[2:]
                    if arguments[0] in ("create", "ssh", "serve"):
                        arguments = with_login(arguments, login)
                    if arguments[0] == "serve" and "--dry-run" not in arguments:
                        arguments.append("--dry-run")
                    try:
                        assert tpu.main(arguments) == 0, (words, capsys.readouterr())
                    except SystemExit as end:
                        assert not end.code and arguments[0] == "ssh", words
                    ran.append(arguments[0])
                elif words[:2] == ["python", "train.py"] and "local" not in words:
                    arguments = [*words[2:], *([] if "--dry-run" in words else ["--dry-run"])]
                    assert train.main(arguments) == 0, (words, capsys.readouterr())
                    ran.append("train")
        finally:
            cloud.close()
    assert ran.count("train") >= 4
    assert set(ran) == {"create", "status", "list", "ssh", "delete", "serve", "train"}
    # The page's pod was made and deleted; its server stays until somebody deletes it, as the page says.
    assert set(cloud.nodes) == {"server"}


def test_the_page_names_every_option(capsys):
    text = PAGE.read_text()
    for program, words in ((tpu, ["create", "--help"]), (tpu, ["serve", "--help"])):
        with pytest.raises(SystemExit):
            program.main(words)
        flags = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out))
        assert not {flag for flag in flags if flag not in text} - {"--help", "--platform"}


def test_what_the_page_says_of_the_config_is_a_config():
    block = json.loads(re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1))
    from mesh_transformer import load_config

    assert load_config(tiny(**block)).mesh.tpu_size == 16
