# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: what is refused, with which words."""

import os
import re
from pathlib import Path

import pytest

from devcluster import cli, containerd, images
from devcluster.errors import ClusterError
from devcluster.layout import Layout, default_layout
from devcluster.lock import held


def test_the_cache_may_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMON_DEVCLUSTER_CACHE", "/elsewhere")
    assert default_layout().cache == Path("/elsewhere")


def test_the_guide_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (default_layout().package / "README.md").read_text()
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    ([a-z-]+) ", capsys.readouterr().out, flags=re.MULTILINE)
    assert {"up", "kubeconfig"} <= set(commands)
    assert [name for name in commands if f"devcluster {name}" not in guide and f"`{name}" not in guide] == []


def test_env_is_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    layout = default_layout()
    assert capsys.readouterr().out.splitlines() == [
        f'export PATH="{layout.bin}:$PATH"',
        f'export KUBECONFIG="{layout.kubeconfig}"',
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            ["up", "--without", "rays"], "The add-ons: kuberay, training-operator, metrics-server", id="unknown add-on"
        ),
        pytest.param(["build", "kubernets"], "There are: kubernetes, etcd", id="unknown program"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    assert said in capsys.readouterr().err


def test_who_is_not_root_is_told_how(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["down"]) == 1
    assert "sudo" in capsys.readouterr().err


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    lock = tmp_path / "locks" / "cluster.lock"
    with held(lock, wait=False), pytest.raises(ClusterError, match="busy"), held(lock, wait=False, busy="busy"):
        pass
    with held(lock, wait=False):
        pass


def test_image_builds_go_beside_each_other_but_not_beside_tidying(tmp_path: Path) -> None:
    lock = tmp_path / "images.lock"
    one, other = held(lock, wait=False, shared=True), held(lock, wait=False, shared=True)
    with one, other, pytest.raises(ClusterError), held(lock, wait=False, busy="building"):
        pass


def test_an_unknown_runtime_is_not_chosen(tmp_path: Path) -> None:
    layout = Layout(repository=tmp_path, cache=tmp_path, state=tmp_path / "state", run=tmp_path / "run")
    with pytest.raises(ClusterError, match="nvidia-all"):
        containerd.choose_default_runtime(layout, "nvidia-all")
    containerd.choose_default_runtime(layout, "nvidia")
    assert 'default_runtime_name = "nvidia"' in (layout.config / "containerd.toml").read_text()


def test_an_images_key_follows_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = default_layout()
    before = {recipe.name: images.key(layout, recipe) for recipe in images.ALL}
    monkeypatch.setattr(images, "PACKAGES", ("something-else",))
    after = {recipe.name: images.key(layout, recipe) for recipe in images.ALL}
    assert before["pause"] == after["pause"]
    assert all(before[name] != after[name] for name in before if name != "pause")
