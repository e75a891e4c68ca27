"""The Kubernetes example: it names what exists, and its parts fit together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_adaptive import ALGORITHM, HOST_VERSION
from sglang_adaptive.options import RULES, variable

FOLDER = Path(__file__).resolve().parents[2] / "launch" / "kubernetes"


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]


def container(name: str) -> dict[str, Any]:
    deployment = next(each for each in documents(name) if each["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (only,) = template["spec"]["containers"]
    names = {volume["name"] for volume in template["spec"].get("volumes", [])}
    assert {mount["name"] for mount in only.get("volumeMounts", [])} == names
    return only


def test_the_server_accepts_its_arguments():
    import argparse

    from sglang.srt.server_args import ServerArgs

    arguments = container("engines.yaml")["args"]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed, unknown = parser.parse_known_args(arguments)
    assert not unknown
    assert parsed.speculative_algorithm == ALGORITHM
    assert parsed.port == container("engines.yaml")["ports"][0]["containerPort"]


def test_its_environment_variables_are_options():
    names = [each["name"] for each in container("engines.yaml")["env"] if each["name"].startswith("SGLANG_ADAPTIVE_")]
    assert names and set(names) <= {variable(name) for name in RULES}


def test_the_image_is_that_of_the_pinned_release():
    assert f"FROM lmsysorg/sglang:v{HOST_VERSION}\n" in (FOLDER / "Dockerfile").read_text()


def test_the_router_finds_the_engines():
    router = container("router.yaml")
    arguments = router["args"]
    labels = documents("engines.yaml")[0]["spec"]["template"]["metadata"]["labels"]
    assert dict([arguments[arguments.index("--selector") + 1].split("=")]) == labels
    engine_port = container("engines.yaml")["ports"][0]["containerPort"]
    assert f"--service-discovery-port={engine_port}" in arguments
    role = next(each for each in documents("router.yaml") if each["kind"] == "Role")
    assert {"get", "list", "watch"} <= set(role["rules"][0]["verbs"])


def test_the_router_accepts_its_arguments():
    pytest.importorskip("sglang_router")
    arguments = container("router.yaml")["args"]
    script = "import argparse,sys;from sglang_router.launch_router import parse_router_args as p;print(p(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "service_discovery=True" in done.stdout
