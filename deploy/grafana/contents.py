"""The dashboards: their rows of panels, and what each panel shows. build.py writes them as JSON."""

from __future__ import annotations

from deploy.grafana.panels import (
    CHAT_MODEL,
    INSTANCE,
    MODEL,
    SERVER,
    SPEECH_MODEL,
    Dashboard,
    Panel,
    heatmap,
    line,
    mean,
    only,
    quantiles,
    rate,
    share,
    stat,
)

SINCE_START = "Mean since the start of the server."
LINES = "The line is the alert's threshold."
_NEUTRAL = (("blue", None),)
_DOWN = f"up{SERVER} == 0"
_ASKED = f"sum(rate(reprise_requests_total{INSTANCE}[5m]))"
_FAILED = only('outcome=~"error|timeout"', INSTANCE)
_FAILING = f"(sum(rate(reprise_requests_total{_FAILED}[5m])) or vector(0))"
_ERRORS = f"({_FAILING} / ({_ASKED} > 0)) or vector(0)"
_DRY = rate("audio_streams_total", "model", only('underrun="true"', SPEECH_MODEL))
_HIT_TOKENS = rate("prefix_cache_hit_tokens_total", "model", CHAT_MODEL)
_QUERY_TOKENS = rate("prefix_cache_query_tokens_total", "model", CHAT_MODEL)

OVERVIEW = Dashboard(
    "reprise-overview",
    "Reprise / Overview",
    (
        (
            "Is it up",
            (
                stat(
                    "Ready",
                    f"min(reprise_ready{INSTANCE} or {_DOWN}) or vector(0)",
                    "bool_yes_no",
                    (("red", None), ("green", 1)),
                    "All instances are up and take requests.",
                ),
                stat(
                    "Engine",
                    f"min(reprise_engine_up{INSTANCE} or {_DOWN}) or vector(0)",
                    "bool_yes_no",
                    (("red", None), ("green", 1)),
                    "The engines of all instances live.",
                ),
                stat("Requests / s", f"{_ASKED} or vector(0)", "reqps", _NEUTRAL),
                stat(
                    "Errors",
                    _ERRORS,
                    "percentunit",
                    (("green", None), ("orange", 0.005), ("red", 0.02)),
                    "Share of the requests of 5 minutes that the server failed, or that took too long.",
                ),
                stat("Running", f"sum(reprise_requests_running{INSTANCE}) or vector(0)", "short", _NEUTRAL),
                stat(
                    "Waiting",
                    f"sum(reprise_requests_waiting{INSTANCE}) or vector(0)",
                    "short",
                    (("green", None), ("orange", 8), ("red", 64)),
                ),
            ),
        ),
        (
            "What is wrong",
            (
                Panel(
                    "Alerts",
                    (),
                    kind="alertlist",
                    width=24,
                    height=5,
                    description="Those that fire or are about to. docs/alerts.md says what each means.",
                ),
            ),
        ),
        (
            "Is it fast",
            (
                Panel(
                    "Time to first token",
                    quantiles("time_to_first_token_seconds"),
                    "s",
                    width=6,
                    thresholds=line("RepriseSlowFirstToken"),
                    description=LINES,
                ),
                Panel(
                    "Gap between tokens",
                    quantiles("inter_token_duration_seconds"),
                    "s",
                    width=6,
                    thresholds=line("RepriseSlowTokens"),
                    description=f"Inter-token latency (ITL). {LINES}",
                ),
                Panel(
                    "Time to first audio",
                    quantiles("time_to_first_audio_seconds"),
                    "s",
                    width=6,
                    thresholds=line("RepriseSlowFirstAudio"),
                    description=LINES,
                ),
                Panel(
                    "Real-time factor",
                    quantiles("audio_realtime_factor"),
                    "short",
                    width=6,
                    thresholds=line("RepriseSpeechSlowerThanPlayback"),
                    description=f"Time to make speech by time to play it: above 1 listeners hear gaps. {LINES}",
                ),
            ),
        ),
        (
            "Traffic",
            (
                Panel(
                    "Requests by outcome",
                    ((rate("requests_total", "endpoint, outcome", INSTANCE), "{{endpoint}} {{outcome}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Rejections",
                    ((rate("admission_rejections_total", "endpoint, reason", INSTANCE), "{{endpoint}} {{reason}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Clients that left",
                    ((rate("client_disconnects_total", "endpoint", INSTANCE), "{{endpoint}}"),),
                    "reqps",
                ),
                Panel("Request duration", quantiles("request_duration_seconds", "endpoint", INSTANCE), "s"),
                Panel(
                    "Tokens / s",
                    (
                        (rate("generated_tokens_total", "model", MODEL), "{{model}} out"),
                        (rate("prompt_tokens_total", "model, kind", MODEL), "{{model}} in {{kind}}"),
                    ),
                    "short",
                ),
                Panel(
                    "Audio made and heard per second",
                    (
                        (rate("audio_generated_seconds_total", "model", MODEL), "{{model}}"),
                        (rate("audio_heard_seconds_total", "model", MODEL), "{{model}} hears"),
                    ),
                    "short",
                    description="Seconds of audio per second of time: how many live streams this load amounts to.",
                ),
            ),
        ),
    ),
)

CHAT = Dashboard(
    "reprise-chat",
    "Reprise / Vision chat",
    (
        (
            "Latency",
            (
                heatmap("Time to first token", "time_to_first_token_seconds", "s", CHAT_MODEL),
                heatmap("Gap between tokens", "inter_token_duration_seconds", "s", CHAT_MODEL),
                Panel(
                    "Gap between tokens: quantiles",
                    quantiles("inter_token_duration_seconds", "model", CHAT_MODEL),
                    "s",
                    thresholds=line("RepriseSlowTokens"),
                    description=f"Inter-token latency (ITL). {LINES}",
                ),
                Panel("Queue", quantiles("queue_duration_seconds", "model", CHAT_MODEL), "s"),
                Panel("Prefill", quantiles("prefill_duration_seconds", "model", CHAT_MODEL), "s"),
                Panel(
                    "Vision encoder pass", quantiles("vision_encode_duration_seconds", "model, route", CHAT_MODEL), "s"
                ),
            ),
        ),
        (
            "Media",
            (
                Panel("Fetch", quantiles("media_fetch_duration_seconds", "kind", INSTANCE), "s"),
                Panel("Decode", quantiles("media_decode_duration_seconds", "kind", INSTANCE), "s"),
                Panel("Preprocess", quantiles("preprocess_duration_seconds", "kind", INSTANCE), "s"),
                Panel(
                    "Refused media",
                    ((rate("media_rejections_total", "kind, reason", INSTANCE), "{{kind}} {{reason}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel("Images per request", quantiles("request_images", "model", CHAT_MODEL), "short"),
                Panel("Video frames per request", quantiles("request_video_frames", "model", CHAT_MODEL), "short"),
            ),
        ),
        (
            "Sizes and caches",
            (
                Panel("Prompt positions", quantiles("request_input_tokens", "model", CHAT_MODEL), "short"),
                Panel("Generated tokens", quantiles("request_output_tokens", "model", CHAT_MODEL), "short"),
                Panel("Tokenize", quantiles("tokenize_duration_seconds", "model", CHAT_MODEL), "s"),
                Panel("Prefix cache hit ratio", ((f"{_HIT_TOKENS} / {_QUERY_TOKENS}", "{{model}}"),), "percentunit"),
                Panel(
                    "Prompts from a recurrent state / s",
                    ((rate("state_snapshot_hits_total", "model", CHAT_MODEL), "{{model}}"),),
                    "reqps",
                    description="Prefix hits of models such as Qwen3.5, which need a cached state, too.",
                ),
                Panel(
                    "Encoder cache hit ratio",
                    (
                        (
                            share("encoder_cache_hits_total", "encoder_cache_misses_total", selector=CHAT_MODEL),
                            "{{model}}",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Drafted tokens / s",
                    (
                        (rate("drafted_tokens_total", "model", CHAT_MODEL), "{{model}} drafted"),
                        (rate("accepted_tokens_total", "model", CHAT_MODEL), "{{model}} accepted"),
                    ),
                    "short",
                ),
                Panel(
                    "Preemptions / s",
                    ((rate("preemptions_total", "model", CHAT_MODEL), "{{model}}"),),
                    "short",
                    thresholds=line("ReprisePreemptions"),
                    description=LINES,
                ),
                Panel("Tool calls / s", ((rate("tool_calls_total", "model", CHAT_MODEL), "{{model}}"),), "short"),
                Panel(
                    "Realtime responses / s",
                    ((rate("realtime_responses_total", "model, status", CHAT_MODEL), "{{model}} {{status}}"),),
                    "short",
                ),
            ),
        ),
    ),
    variables=("chat_model", "instance"),
)

SPEECH = Dashboard(
    "reprise-speech",
    "Reprise / Speech",
    (
        (
            "What listeners hear",
            (
                heatmap("Time to first audio", "time_to_first_audio_seconds", "s", SPEECH_MODEL),
                heatmap("Real-time factor", "audio_realtime_factor", "short", SPEECH_MODEL),
                Panel(
                    "Streams that ran dry",
                    ((f"{_DRY} / {rate('audio_streams_total', 'model', SPEECH_MODEL)}", "{{model}}"),),
                    "percentunit",
                    thresholds=line("RepriseUnderruns"),
                    description=f"Share of the live streams that ended. {LINES}",
                ),
                Panel(
                    "Time to first audio: quantiles",
                    quantiles("time_to_first_audio_seconds", "model", SPEECH_MODEL),
                    "s",
                    thresholds=line("RepriseSlowFirstAudio"),
                    description=LINES,
                ),
                Panel("Queue", quantiles("queue_duration_seconds", "model", SPEECH_MODEL), "s"),
                Panel("Underrun (worst deficit)", quantiles("audio_underrun_seconds", "model", SPEECH_MODEL), "s"),
                Panel("Gap between chunks", quantiles("audio_chunk_gap_seconds", "model", SPEECH_MODEL), "s"),
            ),
        ),
        (
            "Scheduling",
            (
                heatmap(
                    "Slack",
                    "audio_slack_seconds",
                    "s",
                    SPEECH_MODEL,
                    "Least seconds of audio that any live listener has left, per tick.",
                ),
                Panel(
                    "Actual by predicted step time",
                    quantiles("step_prediction_ratio", "model, kind", SPEECH_MODEL),
                    "short",
                    width=12,
                ),
                Panel(
                    "Refused by prediction",
                    ((rate("speech_rejections_total", "model, reason", SPEECH_MODEL), "{{model}} {{reason}}"),),
                    "reqps",
                ),
                Panel(
                    "Waiting and running",
                    (
                        (f"reprise_requests_waiting{SPEECH_MODEL}", "{{model}} waiting @ {{instance}} {{engine}}"),
                        (f"reprise_requests_running{SPEECH_MODEL}", "{{model}} running @ {{instance}} {{engine}}"),
                    ),
                ),
                Panel("Parts of a step", quantiles("speech_part_duration_seconds", "model, part", SPEECH_MODEL), "s"),
                Panel("Audio encoding", quantiles("audio_encode_duration_seconds", "format", INSTANCE), "s"),
            ),
        ),
        (
            "Volume",
            (
                Panel(
                    "Audio made per second",
                    ((rate("audio_generated_seconds_total", "model", SPEECH_MODEL), "{{model}}"),),
                    "short",
                    width=12,
                ),
                Panel(
                    "Characters / s",
                    ((rate("speech_characters_total", "model", SPEECH_MODEL), "{{model}}"),),
                    "short",
                    width=12,
                ),
                Panel(
                    "Spoken answers: time to first audio",
                    quantiles("spoken_first_audio_seconds", "model", INSTANCE),
                    "s",
                    width=12,
                ),
                Panel(
                    "Built-in voices made",
                    ((f"sum by (model) (reprise_built_in_voices_made_total{SPEECH_MODEL})", "{{model}}"),),
                    "short",
                    width=12,
                ),
                Panel(
                    "Speech that ran to its cap / s",
                    (
                        (rate("speech_truncated_total", "model", SPEECH_MODEL), "{{model}} ended"),
                        (rate("speech_retries_total", "model", SPEECH_MODEL), "{{model}} retried"),
                    ),
                    "short",
                    width=12,
                ),
                Panel(
                    "Verified speech / s",
                    ((rate("speech_verifications_total", "model, outcome", SPEECH_MODEL), "{{model}} {{outcome}}"),),
                    "short",
                    width=12,
                ),
                Panel(
                    "Idle streams preempted / s",
                    ((rate("speech_preemptions_total", "model", SPEECH_MODEL), "{{model}}"),),
                    "short",
                    width=12,
                ),
            ),
        ),
    ),
    variables=("speech_model", "instance"),
)


def _replay(selector: str) -> tuple[Panel, ...]:
    """Panels about the steps of one kind of model."""
    eager = only('route="eager"', selector)
    padded = share("padded_rows_total", "replayed_rows_total", by="model, kind", selector=selector)
    return (
        Panel(
            "Steps by route",
            ((rate("steps_total", "model, kind, route", selector), "{{model}} {{kind}} {{route}}"),),
            "ops",
            stacked=True,
            width=12,
        ),
        Panel(
            "Eager steps by reason",
            ((rate("steps_total", "model, kind, reason", eager), "{{model}} {{kind}} {{reason}}"),),
            "ops",
            stacked=True,
            width=12,
        ),
        Panel("Step time", quantiles("step_duration_seconds", "model, kind", selector), "s", width=12),
        Panel("Bucket occupancy", quantiles("bucket_occupancy_ratio", "model, kind", selector), "percentunit", width=6),
        Panel("Padding", ((padded, "{{model}} {{kind}}"),), "percentunit", width=6),
    )


ENGINE = Dashboard(
    "reprise-engine",
    "Reprise / Engine and graphs",
    (
        (
            "Steps of chat models",
            (
                *_replay(CHAT_MODEL),
                Panel("Host time of a step", quantiles("step_host_duration_seconds", "model, kind", CHAT_MODEL), "s"),
                Panel("Masks of guided rows", quantiles("guided_mask_duration_seconds", selector=CHAT_MODEL), "s"),
                Panel("Building a grammar", quantiles("grammar_build_duration_seconds", selector=CHAT_MODEL), "s"),
            ),
        ),
        ("Steps of speech models", _replay(SPEECH_MODEL)),
        (
            "Captures and kernels",
            (
                Panel(
                    "Captures",
                    ((rate("graph_captures_total", "model, kind, outcome"), "{{model}} {{kind}} {{outcome}}"),),
                    "ops",
                    width=12,
                ),
                Panel(
                    "Capture time",
                    mean("graph_capture_duration_seconds", "model, kind"),
                    "s",
                    width=12,
                    description=SINCE_START,
                ),
                Panel(
                    "Kernels compiled",
                    (
                        (
                            f"sum by (phase, cached) (reprise_kernel_compilations_total{INSTANCE})",
                            "{{phase}}, cached {{cached}}",
                        ),
                    ),
                    "short",
                    width=12,
                    description="Any while serving held up every request; the log names it.",
                ),
                Panel(
                    "Kernels that fell back",
                    ((f"sum by (kernel) (reprise_kernel_fallbacks_total{INSTANCE})", "{{kernel}}"),),
                    "short",
                    width=12,
                    description="The GPU does not take their configuration: they ran as plain PyTorch, slower.",
                ),
            ),
        ),
        (
            "Memory",
            (
                Panel("Graphs", ((f"reprise_graph_bytes{INSTANCE}", "{{instance}} {{engine}}"),), "bytes"),
                Panel(
                    "Left to do while idle",
                    (
                        (f"reprise_graph_captures_left{INSTANCE}", "captures, {{instance}} {{engine}}"),
                        (
                            f"sum by (instance, model) (increase(reprise_corrupted_requests_total{INSTANCE}"
                            "[$__rate_interval]))",
                            "NaN, {{instance}} {{model}}",
                        ),
                    ),
                ),
                Panel(
                    "GPU memory",
                    ((f"sum by (state) (reprise_gpu_memory_bytes{INSTANCE})", "{{state}}"),),
                    "bytes",
                    stacked=True,
                ),
                Panel(
                    "Encoder cache, cached recurrent states",
                    (
                        (f"reprise_encoder_cache_bytes{MODEL}", "{{model}} @ {{instance}} {{engine}}"),
                        (f"reprise_state_snapshot_bytes{MODEL}", "states, {{model}} @ {{instance}} {{engine}}"),
                    ),
                    "bytes",
                ),
                Panel(
                    "Cached recurrent states",
                    ((f"reprise_state_snapshots{MODEL}", "{{model}} @ {{instance}} {{engine}}"),),
                    "short",
                ),
                Panel(
                    "KV pages in use",
                    ((f"reprise_kv_cache_usage_ratio{MODEL}", "{{model}} @ {{instance}} {{engine}}"),),
                    "percentunit",
                    thresholds=line("RepriseKVCacheNearlyFull"),
                    description=LINES,
                ),
                Panel(
                    "KV pages",
                    ((f"reprise_kv_cache_pages{MODEL}", "{{model}} {{state}} @ {{instance}} {{engine}}"),),
                    "short",
                ),
                Panel("Slots", ((f"reprise_slots_used{MODEL}", "{{model}} @ {{instance}} {{engine}}"),), "short"),
                Panel(
                    "Second tries for lack of memory / s",
                    ((rate("memory_retries_total", "model, kind, outcome"), "{{model}} {{kind}} {{outcome}}"),),
                    "ops",
                    description="Passes that ran out of GPU memory. Requests got a 503 if the second try failed.",
                ),
            ),
        ),
        (
            "Start",
            (
                Panel(
                    "Phases of the last start",
                    ((f"reprise_start_phase_seconds{INSTANCE}", "{{phase}} @ {{instance}} {{engine}}"),),
                    "s",
                    width=12,
                    stacked=True,
                ),
                Panel(
                    "Model load", mean("model_load_duration_seconds", "model"), "s", width=12, description=SINCE_START
                ),
            ),
        ),
    ),
    variables=("model", "chat_model", "speech_model", "instance"),
)

PROCESS = Dashboard(
    "reprise-process",
    "Reprise / Processes",
    (
        (
            "API process",
            (
                Panel(
                    "CPU",
                    ((f"rate(process_cpu_seconds_total{SERVER}[$__rate_interval])", "{{instance}}"),),
                    "percentunit",
                ),
                Panel("Resident memory", ((f"process_resident_memory_bytes{SERVER}", "{{instance}}"),), "bytes"),
                Panel(
                    "File descriptors",
                    (
                        (f"process_open_fds{SERVER}", "{{instance}} open"),
                        (f"process_max_fds{SERVER}", "{{instance}} limit"),
                    ),
                ),
                Panel("Event loop lag", ((f"reprise_event_loop_lag_seconds{INSTANCE}", "{{instance}}"),), "s"),
                Panel("Event loop tasks", ((f"reprise_event_loop_tasks{INSTANCE}", "{{instance}}"),), "short"),
                Panel(
                    "Bytes of requests in progress", ((f"reprise_admitted_bytes{INSTANCE}", "{{instance}}"),), "bytes"
                ),
                Panel(
                    "Collections",
                    (
                        (
                            f"sum by (generation) (rate(python_gc_collections_total{SERVER}[$__rate_interval]))",
                            "generation {{generation}}",
                        ),
                    ),
                    "ops",
                ),
                Panel(
                    "Requests in progress",
                    ((f"reprise_http_requests_in_progress{INSTANCE}", "{{endpoint}} @ {{instance}}"),),
                    "short",
                ),
                Panel(
                    "Choice among engines",
                    ((rate("engine_choices_total", "reason", INSTANCE), "{{reason}}"),),
                    "reqps",
                    description="Of several engines (--gpus). Many spilled: pictures or prefixes that all ask for.",
                ),
                Panel(
                    "Restarts",
                    (
                        (
                            f"increase(reprise_engine_restarts_total{INSTANCE}[$__rate_interval])",
                            "{{instance}} engine {{engine}}",
                        ),
                        (
                            f"increase(reprise_api_process_restarts_total{INSTANCE}[$__rate_interval])",
                            "{{instance}} API process",
                        ),
                    ),
                    "short",
                ),
            ),
        ),
        (
            "Engine process",
            (
                Panel(
                    "CPU of the engine",
                    (
                        (
                            f"rate(reprise_engine_cpu_seconds_total{INSTANCE}[$__rate_interval])",
                            "{{instance}} {{engine}}",
                        ),
                    ),
                    "percentunit",
                    description="100 % is one processor, which an engine on a GPU keeps busy.",
                ),
                Panel(
                    "Resident memory of the engine",
                    ((f"reprise_engine_resident_memory_bytes{INSTANCE}", "{{instance}} {{engine}}"),),
                    "bytes",
                ),
                Panel(
                    "Threads of the engine",
                    ((f"reprise_engine_threads{INSTANCE}", "{{instance}} {{engine}}"),),
                    "short",
                ),
            ),
        ),
        (
            "What runs",
            (
                Panel(
                    "Version",
                    ((f"reprise_build_info{INSTANCE}", "{{version}}, Python {{python}}, torch {{torch}}"),),
                    "short",
                    "stat",
                    12,
                    4,
                    thresholds=_NEUTRAL,
                    shows_name=True,
                ),
                Panel(
                    "Device",
                    ((f"reprise_engine_info{INSTANCE}", "{{device}}"),),
                    "short",
                    "stat",
                    12,
                    4,
                    thresholds=_NEUTRAL,
                    shows_name=True,
                ),
            ),
        ),
    ),
    variables=("instance",),
)

ALL = (OVERVIEW, CHAT, SPEECH, ENGINE, PROCESS)
