"""With the package installed and another algorithm selected, the host is untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

NAMES = ("plugin", "activation", "family", "errors")
REGISTRATION = {"sglang_adaptive", *(f"sglang_adaptive.{name}" for name in NAMES)}

PROBE = """
import json, os, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

before = {name: value for name, value in vars(SpeculativeAlgorithm).items()}
load_plugins()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args

resolved = []
for arguments in json.loads(sys.argv[1]):
    record = prepare_server_args(arguments)
    record.resolve_once()
    view = resolving_view(record)
    names = sorted(set(record.resolved_dict()) - {"random_seed", "nccl_port"})
    resolved.append({name: repr(getattr(view, name)) for name in names})
print("REPORT" + json.dumps({
    "resolved": resolved,
    "modules": sorted(name for name in sys.modules if name.split(".")[0] == "sglang_adaptive"),
    "patched": sorted(HookRegistry._patched),
    "changed": [name for name, value in vars(SpeculativeAlgorithm).items() if before.get(name) is not value],
    "environment": sorted(name for name in os.environ if name.startswith(("SGLANG_RAGGED", "SGLANG_ADAPTIVE"))),
}))
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def probe(plugins: str, *servers: list[str]) -> dict:
    """Resolve the arguments of these servers in a fresh process with these plugins only.

    The platform plugin is left out: on a machine without an accelerator it would (rightly) step in.
    """
    common = ["--device", "cuda", "--attention-backend", "triton"]
    command = [sys.executable, "-c", PROBE, json.dumps([[*common, *arguments] for arguments in servers])]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    environ["SGLANG_PLUGINS"] = plugins
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)
    lines = [line for line in result.stdout.splitlines() if line.startswith("REPORT")]
    assert result.returncode == 0 and len(lines) == 1, result.stderr[-2000:]
    return json.loads(lines[0].removeprefix("REPORT"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def test_other_algorithms_find_the_host_untouched(model):
    servers = [["--model-path", model], ["--model-path", model, "--speculative-algorithm", "NGRAM"]]
    ours = probe("sglang_adaptive", *servers)
    assert [fields["speculative_algorithm"] for fields in ours["resolved"]] == ["None", "'NGRAM'"]
    assert set(ours["modules"]) == REGISTRATION
    assert (ours["patched"], ours["changed"], ours["environment"]) == ([], [], [])
    without = probe("no_plugin_at_all", *servers)
    assert without["modules"] == []
    assert ours["resolved"] == without["resolved"]


def test_the_probe_sees_it_when_the_algorithm_is_ours():
    ours = probe("sglang_adaptive", ["--model-path", "dummy", "--speculative-algorithm", "dspark_adaptive"])
    assert [fields["speculative_algorithm"] for fields in ours["resolved"]] == ["'DSPARK'"]
    assert "sglang_adaptive.patches.adaptive" in ours["modules"]
    assert ours["changed"] == ["create_worker"]
    assert ours["environment"] == ["SGLANG_RAGGED_VERIFY_MODE"]
