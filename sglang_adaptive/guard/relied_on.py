"""Host symbols that the plugin relies on besides those that its patches declare and its modules import.

Imports are found by themselves (``symbols.imported``); what is listed here is reached in another way: through an
object, a subclass or the order of steps.
"""

from __future__ import annotations

_SPEC = "sglang.srt.speculative"
_WORKER = f"{_SPEC}.dspark_components.dspark_worker_v2.DSparkWorkerV2"
_PLANNER = f"{_SPEC}.dspark_components.dspark_planner"
_VERIFY = f"{_SPEC}.dspark_components.dspark_verify"
_RAGGED = f"{_SPEC}.ragged_verify"
_RELAY = "sglang.srt.managers.overlap_utils"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
_ARGS = "sglang.srt.arg_groups"

RELIED_ON: tuple[str, ...] = (
    # The plugin is loaded, and its hooks are applied, in every process; an error that is an Exception is swallowed.
    "sglang.srt.plugins.load_plugins",
    "sglang.srt.plugins.load_plugins_by_group",
    "sglang.srt.plugins.hook_registry.HookRegistry",
    "sglang.srt.plugins.hook_registry._propagate_patch",
    "sglang.srt.plugins.hook_registry._wrap_fn",
    "sglang.launch_server.run_server",
    # A registered name is accepted, and the family that our first step declares is what every later reader sees.
    f"{_SPEC}.spec_registry.CustomSpecAlgo",
    f"{_SPEC}.spec_registry.register_algorithm",
    f"{_SPEC}.spec_info.SpeculativeAlgorithm.register",
    f"{_SPEC}.spec_info.SpeculativeAlgorithm.from_string",
    f"{_SPEC}.spec_info.SpeculativeAlgorithm.is_dspark",
    f"{_SPEC}.spec_info.SpeculativeAlgorithm.create_worker",
    f"{_SPEC}.spec_info.SpeculativeAlgorithm.create_future_map",
    f"{_SPEC}.spec_info.SpeculativeAlgorithm.handle_server_args",
    f"{_ARGS}.resolution_hooks",
    f"{_ARGS}.pipeline.run_resolution_pipeline",
    f"{_ARGS}.overrides.declare_resolution",
    f"{_ARGS}.overrides.resolution_result",
    f"{_ARGS}.model_override_base.ResolvingConfig",
    f"{_ARGS}.model_override_base.resolving_view",
    f"{_ARGS}.model_override_base.resolved_view",
    f"{_ARGS}.speculative_hook.handle_speculative_decoding",
    f"{_ARGS}.speculative_hook._handle_dspark",
    # The raw record keeps our name, and its bookkeeping travels to child processes.
    "sglang.srt.server_args.ServerArgs.resolve_once",
    "sglang.srt.server_args.ServerArgs.__reduce__",
    "sglang.srt.server_args._rebuild_server_args",
    "sglang.srt.runtime_context._resolved_or_field",
    "sglang.srt.runtime_context.RuntimeContext.set_server_args",
    # The DSpark worker, which ours derives from, and what it builds.
    _WORKER,
    f"{_PLANNER}.DSparkVerifyPlanner",
    f"{_PLANNER}.DSparkScheduleConfig",
    f"{_PLANNER}.HostConfidenceBudgetPlanner",
    f"{_PLANNER}.VerifyBudgetDecision",
    f"{_PLANNER}.graph_tier_fill_budget",
    f"{_PLANNER}.uniform_ragged_layout",
    f"{_PLANNER}.verify_layout_grid",
    f"{_PLANNER}.verify_layout_graph_num_tokens_floor",
    f"{_PLANNER}.ragged_layout_exceeds_captured_grid",
    f"{_VERIFY}.TargetVerifyExecutor",
    f"{_VERIFY}.DsparkVerifyEpilogue",
    f"{_VERIFY}.accept_draft_tokens",
    # A step of a shorter block: what has its width from the worker, what is kept from it, and who reads its output.
    f"{_VERIFY}.build_accept_outs",
    f"{_SPEC}.dspark_components.dspark_kv_inject.TargetHiddenKvInjector.inject_target_hidden",
    f"{_SPEC}.dspark_components.dspark_observability.DsparkStepObservers",
    "sglang.srt.managers.scheduler_components.batch_result_processor._get_speculative_output_stride",
    f"{_SPEC}.dspark_components.dspark_draft.DraftBlockProposer",
    f"{_SPEC}.dspark_components.dspark_draft.DraftBlockResult",
    f"{_SPEC}.dspark_components.dspark_config.resolve_runtime_config",
    f"{_SPEC}.base_spec_worker.BaseSpecWorker",
    f"{_RAGGED}.RaggedVerifyMode",
    f"{_RAGGED}.read_ragged_verify_mode",
    f"{_RAGGED}.RaggedVerifyLayout",
    f"{_RAGGED}.resolve_ragged_verify_layout",
    f"{_RAGGED}.build_capture_verify_lens",
    f"{_RAGGED}.compute_target_verify_graph_key",
    # The EAGLE worker, which ours derives from; what it drafts, verifies and extends with, and its graphs.
    f"{_SPEC}.eagle_worker_v2.EAGLEWorkerV2",
    f"{_SPEC}.eagle_worker_v2.EagleDraftWorker",
    f"{_SPEC}.base_spec_worker.EagleDraftWorkerBase",
    f"{_SPEC}.eagle_worker_common.prepare_for_draft",
    f"{_SPEC}.eagle_worker_common.prepare_for_draft_extend",
    f"{_SPEC}.eagle_worker_common.build_eagle_verify_input",
    f"{_SPEC}.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
    f"{_SPEC}.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner",
    f"{_SPEC}.spec_info.SpeculativeAlgorithm.is_eagle",
    f"{_SPEC}.spec_info.SpecInput",
    f"{_ARGS}.speculative_hook._handle_eagle_family",
    f"{_ARGS}.speculative_hook._resolve_speculative_algorithm_alias",
    "sglang.srt.configs.model_config.ModelConfig._config_draft_model",
    # Confidences travel from the worker to the next steps' sizing.
    f"{_RELAY}.FutureMap",
    f"{_RELAY}.ConfidenceRelay",
    f"{_RELAY}.ResolvedConfidence",
    f"{_RELAY}.RelayPayload",
    f"{_RELAY}.decide_needs_confidence_relay",
    f"{_RELAY}.resolve_forward_inputs",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.reqs",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.req_pool_indices",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.seq_lens",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.seq_lens_cpu",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.spec_info",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.merge_batch",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
    "sglang.srt.managers.scheduler.Scheduler.run_batch",
    # The graphs that serve ragged rows.
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.ragged_verify_compact_graphs_enabled",
    # A second attention backend and second graphs, as the host's own adaptive EAGLE makes them.
    "sglang.srt.model_executor.model_runner.ModelRunner._get_attention_backend",
    "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.__init__",
    "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.__init__",
    "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend.__init__",
    # What a platform provides.
    "sglang.srt.platforms._resolve_platform",
    "sglang.srt.platforms.interface.SRTPlatform",
    "sglang.srt.platforms.interface.PlatformCapabilities",
    "sglang.srt.platforms.device_mixin.DeviceMixin",
    # In a mixed step our workers call the barrier that the host hands to them.
    "sglang.srt.managers.scheduler.Scheduler._advance_pending_grammar",
    f"{_RESULTS}.SchedulerBatchResultProcessor.advance_grammar_fsm",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running",
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.update_regex_vocab_mask",
    # A step without a draft hands out one token a request, and writes the draft's KV in its graph.
    f"{_RESULTS}._get_speculative_output_stride",
    "sglang.srt.utils.common.async_d2h",
    "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.space",
    "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.plan_uniform_extend",
    "sglang.srt.models.dspark.DSparkDraftMixin.write_target_hidden_kv",
)
