"""From the flag to an active process, without starting a server."""

from __future__ import annotations

import os
import pickle
import textwrap

import pytest
from warm_python import run_code

PRELUDE = """
    import os, pickle, sys
    from sglang.srt.plugins import load_plugins
    load_plugins()
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs
    from sglang_adaptive.patches import registry

    def record(algorithm="DSPARK_ADAPTIVE", **options):
        args = ServerArgs(model_path=sys.argv[1], speculative_algorithm=algorithm,
                          speculative_draft_model_path=sys.argv[2] if algorithm else None, **options)
        args.resolve_once()
        return args
"""


def run(script: str, pair) -> list[str]:
    """Run a script in a process of its own; returns what it printed after 'SAY '."""
    environment = {name: value for name, value in os.environ.items() if name != "SGLANG_RAGGED_VERIFY_MODE"}
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(script)
    status, output, errors = run_code(code, [*map(str, pair)], environment)
    assert status == 0, errors[-3000:]
    return [line[4:] for line in output.splitlines() if line.startswith("SAY ")]


def test_the_host_resolves_the_family_and_keeps_the_name(tiny_pair):
    said = run(
        """
        args = record("dspark_adaptive")
        print("SAY", resolving_view(args).speculative_algorithm, args.resolved_dict()["speculative_algorithm"])
        print("SAY", os.environ["SGLANG_RAGGED_VERIFY_MODE"])
        """,
        tiny_pair,
    )
    assert said == ["DSPARK DSPARK_ADAPTIVE", "compact"]


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_drafts_of_layers_resolve_to_their_family_with_a_chain(kind, request, tmp_path):
    if kind == "eagle3":
        pair = request.getfixturevalue("tiny_eagle3_pair")
    else:
        pair = (request.getfixturevalue("tiny_mtp_target"),) * 2  # the target as its own draft
    file = tmp_path / "record"
    said = run(
        f"""
        args = record()
        view = resolving_view(args)
        print("SAY", view.speculative_algorithm, args.resolved_dict()["speculative_algorithm"])
        print("SAY", view.speculative_num_steps, view.speculative_eagle_topk, view.speculative_num_draft_tokens)
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        print("SAY", SpeculativeAlgorithm.from_string("DSPARK_ADAPTIVE").is_eagle())
        print("SAY", SpeculativeAlgorithm[view.speculative_algorithm].create_worker(args).__name__)
        open({str(file)!r}, "wb").write(pickle.dumps(args))
        """,
        pair,
    )
    chain = {"eagle3": "5 1 6", "mtp": "3 1 4"}[kind]
    family = {"eagle3": "EAGLE3", "mtp": "EAGLE"}[kind]
    assert said == [f"{family} DSPARK_ADAPTIVE", chain, "True", "AdaptiveEagleWorker"]
    said = run(
        f"""
        pickle.loads(open({str(file)!r}, "rb").read())
        from sglang_adaptive import activation
        print("SAY", activation.active_family().name, os.environ["SGLANG_RAGGED_VERIFY_MODE"])
        """,
        pair,
    )
    name = {"eagle3": "EAGLE3", "mtp": "NEXTN"}[kind]
    assert said == [f"{name} compact"]


def test_a_child_process_is_activated_by_the_pickled_record(tiny_pair, tmp_path):
    file = tmp_path / "record"
    run(f"open({str(file)!r}, 'wb').write(pickle.dumps(record()))", tiny_pair)
    said = run(
        f"""
        print("SAY", any("create_worker" in target for target in registry.applied()))
        pickle.loads(open({str(file)!r}, "rb").read())
        print("SAY", any("create_worker" in target for target in registry.applied()))
        print("SAY", os.environ["SGLANG_RAGGED_VERIFY_MODE"])
        """,
        tiny_pair,
    )
    assert said == ["False", "True", "compact"]


def test_another_algorithm_after_ours_finds_its_environment_as_it_was(tiny_pair):
    said = run(
        """
        record()
        other = record("DSPARK")
        print("SAY", "SGLANG_RAGGED_VERIFY_MODE" in os.environ, other.resolved_dict()["speculative_algorithm"])
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        print("SAY", SpeculativeAlgorithm.DSPARK.create_worker(other).__name__)
        """,
        tiny_pair,
    )
    assert said == ["False DSPARK", "DSparkWorkerV2"]


def test_the_registered_name_answers_like_its_family(tiny_pair):
    said = run(
        """
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        ours, family = SpeculativeAlgorithm.from_string("DSPARK_ADAPTIVE"), SpeculativeAlgorithm.DSPARK
        kinds = ("is_", "supports_", "has_", "carries_")
        questions = [name for name in vars(SpeculativeAlgorithm) if name.startswith(kinds)]
        questions += ["need_topk"]
        print("SAY", len(questions) > 15, all(getattr(ours, q)() == getattr(family, q)() for q in questions))
        print("SAY", ours.supports_overlap)
        """,
        tiny_pair,
    )
    assert said == ["True True", "True"]


def test_a_hook_of_another_plugin_on_our_target_is_refused(tiny_pair):
    said = run(
        """
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType, HookSource
        record()
        HookRegistry.register("sglang.srt.server_args.ServerArgs.resolved_dict", lambda r, *a: r, HookType.AFTER,
                              source=HookSource("stranger", None))
        try:
            registry.refuse_foreign_hooks()
        except SystemExit as error:
            print("SAY", error.code)
        """,
        tiny_pair,
    )
    assert len(said) == 1 and "plugin stranger hooks" in said[0] and "SGLANG_PLUGINS" in said[0]


def test_an_attention_backend_with_one_length_for_all_verifies_uniformly(tiny_pair):
    said = run(
        """
        from sglang_adaptive.guard import backends
        backends.CAPABILITY["adaptive_cpu"] = backends.UNIFORM
        args = record()
        print("SAY", os.environ["SGLANG_RAGGED_VERIFY_MODE"], args._sglang_adaptive.mode)
        """,
        tiny_pair,
    )
    assert said == ["static static"]


def test_what_a_gpu_verifies_without_graphs_and_with_adapters(tiny_pair):
    """The decision alone, for a GPU that is not there."""
    said = run(
        """
        from types import SimpleNamespace
        from sglang.srt.arg_groups import overrides
        from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config
        from sglang_adaptive import activation

        disabled = resolving_view(record(disable_cuda_graph=True)).cuda_graph_config.decode.backend
        args = record()

        def decide(without_graphs, backend, **adapters):
            config = default_cuda_graph_config()
            if without_graphs:
                config.decode.backend = disabled
            view = {"device": "cuda", "cuda_graph_config": config, "enable_lora": None, "lora_paths": None, **adapters}
            overrides.resolving_view = lambda _: SimpleNamespace(**view)
            overrides.attention_backends_of = lambda _: [backend]
            args._sglang_adaptive = activation.Marker("compact", "DSPARK")
            activation._fall_back_to_uniform(args)
            print("SAY", args._sglang_adaptive.mode)

        for backend in ("fa3", "flashinfer", "triton"):
            for without_graphs in (False, True):
                decide(without_graphs, backend)
        decide(False, "fa3", enable_lora=True)
        decide(False, "fa3", lora_paths=["a=/nowhere"])
        decide(False, "fa3", lora_paths=["a=/nowhere"], enable_lora=False)
        """,
        tiny_pair,
    )
    # fa3 packs under graphs and without, flashinfer only without, triton never; adapters come in one length.
    assert said == ["compact", "compact", "static", "compact", "static", "static", "static", "static", "compact"]


def test_the_marker_survives_copies():
    from sglang_adaptive.activation import Marker

    assert Marker("static", "EAGLE3").__reduce__()[1] == ("static", "EAGLE3")
    assert pickle.dumps(Marker("static", "EAGLE3"))
