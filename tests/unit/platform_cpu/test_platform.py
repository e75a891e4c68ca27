"""When the platform activates, and what it assumes where the user says nothing."""

import os
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig

from sglang_adaptive import platform_cpu
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.platform_cpu import defaults
from sglang_adaptive.platform_cpu.pool import lazy_zeros


def test_activates_where_no_accelerator_is_visible(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(platform_cpu, "accelerator_visible", lambda: False)
    assert platform_cpu.activate() == platform_cpu.PLATFORM_CLASS


def test_never_activates_where_one_is(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert platform_cpu.activate() is None


@pytest.mark.parametrize("name", ["npu", "hpu", "musa"])
def test_never_activates_for_a_vendor_that_torch_knows_by_its_own_name_only(monkeypatch, name):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch, name, SimpleNamespace(is_available=lambda: True), raising=False)
    assert platform_cpu.activate() is None


def test_the_hosts_own_cpu_engine_has_precedence(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(platform_cpu, "accelerator_visible", lambda: False)
    assert platform_cpu.activate() is None


def arguments(**changes):
    record = {
        "cuda_graph_config": CudaGraphConfig(),
        "attention_backend": None,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "speculative_algorithm": None,
        "enable_deterministic_inference": False,
        "dtype": "auto",
        "max_total_tokens": None,
        "max_running_requests": None,
        "speculative_draft_attention_backend": None,
        "disable_hybrid_swa_memory": False,
        "lora_backend": "csgmv",
        "enable_lora": None,
        "lora_paths": None,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
    }
    return SimpleNamespace(**(record | changes))


@pytest.fixture
def environment(monkeypatch):
    """The environment of a launcher with nothing set, restored afterwards."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("SGLANG_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
    return os.environ


def test_defaults(environment):
    args = arguments()
    defaults.apply(args)
    assert args.dtype == "float32"
    assert args.max_total_tokens == defaults.MAX_TOTAL_TOKENS
    assert args.max_running_requests == defaults.MAX_RUNNING_REQUESTS
    assert args.speculative_draft_attention_backend == platform_cpu.ATTENTION_BACKEND
    assert args.lora_backend == "torch_native"
    assert args.cuda_graph_config.decode.backend == Backend.DISABLED
    assert args.cuda_graph_config.prefill.backend == Backend.DISABLED


@pytest.mark.parametrize(
    ("flag", "said", "found"),
    [(True, None, platform_cpu.ATTENTION_BACKEND), (True, "torch_native", "torch_native"), (False, None, None)],
)
def test_seeds_are_honoured_with_the_attention_of_this_platform(environment, flag, said, found):
    """Under the flag the host would choose a GPU's; without it the choice comes later."""
    args = arguments(enable_deterministic_inference=flag, attention_backend=said)
    defaults.apply(args)
    assert args.attention_backend == found


def test_what_the_user_says_stands(environment):
    environment["OMP_NUM_THREADS"] = "3"
    said = {
        "dtype": "bfloat16",
        "max_total_tokens": 100,
        "max_running_requests": 3,
        "decode_attention_backend": "torch_native",
    }
    args = arguments(**said)
    defaults.apply(args)
    assert {name: getattr(args, name) for name in said} == said
    assert environment["OMP_NUM_THREADS"] == "3"


ATTENTION_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


@pytest.mark.parametrize("field", ATTENTION_FLAGS)
@pytest.mark.parametrize("algorithm", [None, "DSPARK"])
def test_attention_that_needs_a_gpu_is_refused(environment, field, algorithm):
    choices = {*ATTENTION_BACKEND_CHOICES} - {"torch_native", "flex_attention", "intel_amx", "adaptive_cpu"}
    assert {"triton", "fa3", "flashinfer"} <= choices
    for name in choices:
        with pytest.raises(AdaptiveError, match=f"{name} does not run .*: drop --{field.replace('_', '-')}\\.$"):
            defaults.apply(arguments(**{field: name, "speculative_algorithm": algorithm}))


@pytest.mark.parametrize("field", ATTENTION_FLAGS)
@pytest.mark.parametrize("name", ["torch_native", "flex_attention", "intel_amx"])
def test_attention_of_the_host_in_torch_serves_but_does_not_verify(environment, field, name):
    defaults.apply(arguments(**{field: name}))
    with pytest.raises(AdaptiveError, match=f"{name} cannot verify draft tokens"):
        defaults.apply(arguments(**{field: name, "speculative_algorithm": "DSPARK_ADAPTIVE"}))
    defaults.apply(arguments(**{field: platform_cpu.ATTENTION_BACKEND, "speculative_algorithm": "DSPARK_ADAPTIVE"}))


def test_a_draft_runs_with_the_attention_of_this_platform_only(environment):
    """Without a draft the flag says nothing."""
    defaults.apply(arguments(speculative_draft_attention_backend="triton"))
    with pytest.raises(AdaptiveError, match="drop --speculative-draft-attention-backend"):
        defaults.apply(arguments(speculative_draft_attention_backend="triton", speculative_algorithm="EAGLE"))


def test_adapters_with_kernels_of_gpus_are_refused(environment):
    with pytest.raises(AdaptiveError, match="drop --lora-backend triton"):
        defaults.apply(arguments(lora_backend="triton", lora_paths=["a=/nowhere"]))
    defaults.apply(arguments(lora_backend="triton"))
    defaults.apply(arguments(lora_backend="torch_native", enable_lora=True))


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ({0, 1, 2, 3}, 1, "0,1,2,3"),
        ({0, 1, 2, 3}, 2, "0,1|2,3"),
        ({4, 6, 9}, 2, "4|6"),
        ({0, 1}, 4, "0|1|0|1"),
    ],
)
def test_cores_are_dealt_out_to_the_ranks(monkeypatch, environment, cores, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    defaults.export_environment(ranks)
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == expected
    assert environment["OMP_NUM_THREADS"] == str(len(expected.split("|")[0].split(",")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_memory_is_zero_and_writable(dtype):
    memory = lazy_zeros((5, 3, 2), dtype)
    assert memory.shape == (5, 3, 2) and memory.dtype == dtype
    assert not memory.any()
    memory[2, 1] = 1
    assert memory.sum() == 2
