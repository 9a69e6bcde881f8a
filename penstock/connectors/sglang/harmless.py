"""The server arguments of SGLang that cannot change the KV of given tokens, with reasons.

Every argument that is not listed here is part of the namespace, with its resolved value. An
argument that a new version of SGLang adds therefore costs cache hits until we have read what it
does, but never gives wrong KV.
"""

from __future__ import annotations

from typing import Final

HARMLESS: Final[dict[str, tuple[str, ...]]] = {
    "These are names. Files identify the weights, and token ids identify the prompts.": (
        *("model_path", "revision", "served_model_name", "download_dir", "tokenizer_path"),
        *("tokenizer_mode", "tokenizer_backend", "tokenizer_worker_num", "skip_tokenizer_init"),
        *("detokenizer_worker_num", "enable_tokenizer_batch_encode", "weight_version"),
        *("disable_tokenizer_batch_decode", "enable_dynamic_batch_tokenizer"),
        *("dynamic_batch_tokenizer_batch_size", "dynamic_batch_tokenizer_batch_timeout"),
        *("speculative_draft_model_path", "speculative_draft_model_revision"),
    ),
    "These say where the server listens, who may ask, and how it answers.": (
        *("host", "port", "grpc_port", "fastapi_root_path", "api_key", "admin_api_key"),
        *("grpc_worker_threads", "grpc_response_timeout_secs", "skip_server_warmup", "warmups"),
        *("enable_http2", "http2_max_concurrent_streams", "http2_initial_connection_window_size"),
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password"),
        *("enable_ssl_refresh", "enable_http_worker_reuseport", "smg_http_sidecar_port"),
        *("chat_template", "trust_request_chat_template", "hf_chat_template_name"),
        *("completion_template", "enable_cache_report", "return_input_ids", "return_output_ids"),
        *("reasoning_parser", "default_chat_template_kwargs", "tool_call_parser", "tool_server"),
        *("sampling_defaults", "preferred_sampling_params", "stream_interval"),
        *("batch_notify_size", "stream_response_default_include_usage"),
        *("incremental_streaming_output", "enable_response_store", "file_storage_path"),
        *("allow_auto_truncate", "sampling_mask_max_tokens"),
    ),
    "These control logs, metrics, traces and dumps.": (
        *("log_level", "log_level_http", "log_requests", "log_requests_level"),
        *("log_requests_format", "log_requests_target", "uvicorn_access_log_exclude_prefixes"),
        *("crash_dump_folder", "show_time_cost", "enable_metrics", "enable_mfu_metrics"),
        *("enable_metrics_for_all_schedulers", "load_snapshot_publish_interval"),
        *("tokenizer_metrics_custom_labels_header", "tokenizer_metrics_allowed_custom_labels"),
        *("extra_metric_labels", "bucket_time_to_first_token", "bucket_inter_token_latency"),
        *("bucket_e2e_request_latency", "prompt_tokens_buckets", "generation_tokens_buckets"),
        *("gc_warning_threshold_secs", "decode_log_interval", "enable_request_time_stats_logging"),
        *("kv_events_config", "load_publish_endpoint", "enable_forward_pass_metrics"),
        *("forward_pass_metrics_worker_id", "forward_pass_metrics_ipc_name", "enable_trace"),
        *("trace_modules", "otlp_traces_endpoint", "otlp_service_name", "export_metrics_to_file"),
        *("export_metrics_to_file_dir", "stat_loggers", "enable_layerwise_nvtx_marker"),
        *("debug_tensor_dump_output_folder", "debug_tensor_dump_layers"),
    ),
    "These limit and order what runs at the same time.": (
        *("mem_fraction_static", "max_running_requests", "max_queued_requests"),
        *("max_total_tokens", "chunked_prefill_size", "prefill_decode_interval"),
        *("prefill_decode_interval_min_bs", "enable_dynamic_chunking", "max_prefill_tokens"),
        *("prefill_max_requests", "schedule_policy", "enable_priority_scheduling"),
        *("disable_priority_preemption", "default_priority_value", "retraction_policy"),
        *("abort_on_priority_when_disabled", "schedule_low_priority_values_first"),
        *("priority_scheduling_preemption_threshold", "schedule_conservativeness"),
        *("radix_eviction_policy", "radix_eviction_policy_config", "scheduler_recv_interval"),
        *("_radix_eviction_policy_explicitly_set", "num_continuous_decode_steps"),
        *("disable_overlap_schedule", "enable_mixed_chunk", "watchdog_timeout"),
        *("soft_watchdog_timeout", "sleep_on_idle", "gc_threshold", "custom_sigquit_handler"),
        *("enable_prefill_delayer", "prefill_delayer_max_delay_passes", "min_free_slots_delay"),
        *("prefill_delayer_token_usage_low_watermark", "prefill_delayer_queue_min_ratio"),
        *("prefill_delayer_forward_passes_buckets", "prefill_delayer_wait_seconds_buckets"),
        *("prefill_delayer_max_delay_ms", "pp_max_micro_batch_size", "pp_async_batch_depth"),
        *("load_balance_method", "dp_size", "enable_memory_saver", "disable_cuda_graph_padding"),
    ),
    "These place processes, and connect them.": (
        *("nccl_port", "dist_timeout", "dist_init_addr", "gated_launch_port", "nnodes"),
        *("node_rank", "base_gpu_id", "gpu_id_step", "numa_node", "use_ray"),
        *("engine_info_bootstrap_port", "disaggregation_bootstrap_port", "pre_warm_nccl"),
    ),
    "They act on tokens after the KV has been computed. Random weights have no name anyway.": (
        *("random_seed", "sampling_backend", "grammar_backend"),
        *("constrained_json_whitespace_pattern", "constrained_json_disable_any_whitespace"),
        *("constrained_json_max_whitespace_cnt", "enable_custom_logit_processor"),
        *("disable_outlines_disk_cache", "enable_return_routed_experts"),
        *("enable_return_hidden_states", "return_hidden_states_mode"),
    ),
    "They size and move SGLang's own tiers. The layout of host memory is part of each pool's.": (
        *("enable_hierarchical_cache", "hicache_host_memory_mode", "hicache_ratio"),
        *("hicache_size", "hicache_write_policy", "hicache_io_backend", "hicache_mem_layout"),
        *("hicache_storage_backend", "hicache_storage_prefetch_policy"),
        *("hicache_storage_backend_extra_config", "hicache_host_memory_fraction"),
        *("hicache_storage_prefetch_retry_poll_interval", "page_size"),
        *("hicache_storage_prefetch_retry_max_attempts",),
    ),
    "They only decide how weights get from their files into memory.": (
        *("weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints"),
        *("weight_loader_prefetch_num_threads", "weight_loader_drop_cache_after_load"),
        *("model_checksum",),
    ),
    "Captured graphs run the same kernels.": (
        *("cuda_graph_config", "cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill"),
        *("cuda_graph_bs_decode", "cuda_graph_bs_prefill", "cuda_graph_prefill_max_context"),
        *("cuda_graph_max_seq_len_prefill", "disable_prefill_cuda_graph"),
        *("disable_decode_cuda_graph", "disable_cuda_graph", "enable_profile_cuda_graph"),
        *("enable_cudagraph_gc", "debug_cuda_graph"),
    ),
}


def harmless_arguments() -> set[str]:
    return {name for names in HARMLESS.values() for name in names}
