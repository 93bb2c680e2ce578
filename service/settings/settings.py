"""Every setting in one place, with its description. A field `max_n` is the flag --max-n, the variable REPRISE_MAX_N
and the key max_n of a YAML file (--config). Flags override variables, variables override the file.

Lists are repeated flags, YAML lists, or words separated by spaces in a variable; one value may stand for a list of one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from service.link.config import Device, Drafts, DType, LoadFormat, Quantization
from service.settings.reading import (
    MIB,
    ApiCount,
    Bytes,
    Count,
    Gpus,
    Host,
    Location,
    Origins,
    Pause,
    Seconds,
    Secrets,
    SettingsError,
    Slots,
    Steps,
    Variables,
    Words,
    Workers,
    explain,
    read_file,
    suggestion,
)
from service.system.access import is_loopback, keys_in, media_hosts_problem
from service.system.gpus import engines_problem

ENV_PREFIX = "REPRISE_"
OTHER_VARIABLES = ("config", "url", "publish", "publish_port")
"""Variables of the command line and of Compose that are not settings of the server."""
PANELS = {
    "model": "Models",
    "host": "Server",
    "threads": "Engine",
    "max_in_flight": "Limits",
    "media_urls": "Media",
    "voices_dir": "Speech",
}
"""Groups in the help and the documentation, by the first setting of each."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    # Models
    model: Words = ()
    """Hub id or local directory of a model to serve, once per model; HUB_ID@REVISION pins weights, tokenizer and
    processor together. Default: the embedded models, reprise/qwen2_vl, reprise/qwen3_asr and reprise/voxcpm2."""
    served_model_name: Words = ()
    """Names under which a model is served: ALIAS[,ALIAS] with one model, MODEL=ALIAS[,ALIAS] with several. Answers and
    metrics use the first one."""
    dtype: DType = "auto"
    """Type of weights and caches; auto is bfloat16 on CUDA and float32 on a CPU."""
    quantization: Quantization = "none"
    """fp8 holds linear layers of chat models' decoders in 8 bits (e4m3), quantised at load; speech stays in 16."""
    load_format: LoadFormat = "published"
    """random reads only the configuration and fills weights at random, for benchmarks."""
    device: Device = "auto"
    """auto uses CUDA if there is a supported GPU."""

    # Server
    host: Host = "127.0.0.1"
    """Address to bind; any address wider than loopback requires an API key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to bind; 0 picks a free one."""
    api_key: Secrets = ()
    """Bearer keys that clients may use."""
    api_key_file: Location | None = None
    """File with one key per line; lines with # in front are skipped."""
    separate_keys: bool = False
    """An uploaded voice belongs to the key that uploaded it, and chats of different keys share no cached prompts and
    media; off: all keys share both."""
    allowed_host: Words = ()
    """Host names that requests may use, in addition to loopback and the bound address. Checked, against DNS rebinding
    by web pages, if no API key is set or if names are listed here; * allows every name."""
    insecure_no_auth: bool = False
    """Allow an address wider than loopback without any API key."""
    metrics_open: bool = True
    """Serve /metrics without a key."""
    page: bool = True
    """Serve the page at /, and it, /docs and /openapi.json without a key; API requests of the page need one."""
    api_processes: ApiCount = "auto"
    """Processes that answer requests, on one port and with the same engines. Limits count all of them together;
    --media-workers and numbers of threads apply to each. auto: 4 for each GPU if there are enough processors, at least
    14; otherwise 1."""
    gpus: Gpus | None = None
    """GPUs, each with its own engine: a number, all, or a list such as 0,2; default: one."""
    engines: Annotated[int, Field(ge=1, le=64)] = 1
    """Engines on the CPU, each with its share of the threads; for GPUs use --gpus."""
    cors_origin: Origins = ()
    """Origins of web pages that may use the API; * allows every origin."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level to log."""
    log_format: Literal["text", "json"] = "text"
    """Lines of text, or one JSON object a line."""
    drain_delay: Pause = 0.0
    """Seconds between turning /ready red and refusing connections, for balancers to notice."""
    drain_timeout: Pause = 30.0
    """Seconds that running requests may take to end at shutdown."""

    # Engine
    threads: Workers | None = None
    """Threads that compute in the engine; default: OMP_NUM_THREADS, or 1 for models of less than 64 MiB, or one for
    each usable CPU (by affinity and the container's quota), at most 16."""
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory to use for all models together."""
    kv_cache_tokens: Annotated[int | None, Field(ge=64)] = None
    """Positions of each model's KV cache; default: what is left of the GPU's memory, 16384 on a CPU."""
    max_running: Slots | None = None
    """Request slots of a model; default: 64, 128 on GPUs from 40 GB."""
    max_waiting: Count = 256
    """Requests of a model that may wait in the engine; more get 503."""
    max_step_tokens: Annotated[int, Field(ge=16)] = 2048
    """Token budget of a step. Longer prefills are cut into chunks, and further while live speech needs the GPU."""
    itl_target: Seconds | None = None
    """Target of the gap between tokens beside prefills (s); default: 0.0125 on a GPU, none on a CPU."""
    graphs: bool = True
    """Capture CUDA graphs and replay them; off: everything runs eagerly."""
    drafts: Drafts = "off"
    """How the next tokens of chat answers are drafted, several of which a step then verifies. lookup: they are what
    followed the same tokens earlier in the conversation. mtp: by the models that have a layer for it (Qwen3.5)."""
    draft_tokens: Annotated[int, Field(ge=1, le=4)] = 3
    """Drafts of an answer that a step verifies."""
    graph_memory: Bytes | None = None
    """Memory limit of captured CUDA graphs; default: 4G, but at most an eighth of the GPU's memory, and about half of
    what weights leave."""
    encoder_cache: Bytes | None = None
    """Memory limit of cached image embeddings; default: 1G, but at most a 32nd of the GPU's memory."""
    first_audio_target: Seconds | None = None
    """Speech predicted to start later than this is refused (s); default: 2 on a GPU, none on a CPU."""
    max_speech_load: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Share of real time that the steps of live streams may take; more speech is refused. Default: 0.8 on a GPU, no
    limit on a CPU."""
    hang_timeout: Seconds = 30.0
    """Silence after which a ready engine, or one of several API processes, is restarted (s)."""

    # Limits
    max_in_flight: Count = 256
    """Requests in progress; more are answered 503 with Retry-After."""
    max_body: Bytes = 64 * MIB
    """Bytes of a request's body, and at most of a file that it names."""
    max_pending_bytes: Bytes = 1536 * MIB
    """Bytes of bodies, messages, fetched and decoded media in progress; more wait for their turn. What decoding the
    largest picture may take is set aside of it."""
    max_images: Count = 16
    """Images of a chat request."""
    max_frames: Count = 768
    """Frames sampled from all videos of a request."""
    max_request_pixels: Count = 350_000_000
    """Decoded pixels of all media of a request."""
    max_n: Annotated[int, Field(ge=1, le=128)] = 8
    """Choices (n) of a chat request."""
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    """Tokens of an answer; default: to the context's end."""
    max_connections: Count = 4096
    """Open connections; a further one replaces an idle one or is closed."""
    queue_timeout: Seconds = 120.0
    """Time to wait for a request slot; then 503 (s)."""
    request_timeout: Seconds = 600.0
    """Time of a whole request (s); a chat answer then ends with what there is so far."""
    write_timeout: Seconds = 30.0
    """Time after which a client that reads nothing is cut off (s)."""

    # Media
    media_urls: Literal["off", "allowlist", "public"] = "off"
    """Remote URLs in requests: refused, only hosts in --media-domain, or any public address."""
    media_domain: Words = ()
    """HOST or HOST:PORT that --media-urls allowlist admits; for no other mode."""
    media_workers: Workers = 1
    """Processes that decode videos and audio; a video is decoded on up to 8 threads."""
    isolate_images: bool = False
    """Decode pictures in confined processes, too, one for each thread; slower."""

    # Speech
    voices_dir: Location = Path("~/.local/share/reprise/voices")
    """Directory of uploaded voices; created when it is needed."""
    fixed_voices: Literal["at_use", "off"] = "at_use"
    """Built-in voices sound the same in every request, by references that are kept in --voices-dir, each made at its
    first use; off: each seed draws a new voice that fits the name."""
    lora_voices: Location | None = None
    """Directory of LoRA adapters in VoxCPM's format, each in a folder with the voice's name."""
    lexicon: Location | None = None
    """YAML file of words and what is spoken for each, `word: spoken`, for all texts."""
    spoken_answer_model: str | None = None
    """Served name of the speech model that speaks chat answers; default: the only one hosted."""
    max_speech_chars: Count = 65536
    """Characters of a text to speak; with its numbers written as words it may have twice as many."""
    solver_steps: Steps = ()
    """Numbers of solver steps (4 to 32) that requests may choose as inference_timesteps, at most 8; the first is the
    default. Each has its own captured graphs, made once it is asked for. Default: the model's, 10 4 6 16."""

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        for name, value in self:  # a user of a container may have no home
            if isinstance(value, Path) and os.path.expanduser(value).startswith("~"):
                raise ValueError(f"{name}: no home is known for {value}; set HOME, or name another path")
        if problem := media_hosts_problem(self.media_urls, self.media_domain):
            raise ValueError(problem)
        if twice := [name for name in self.model if self.model.count(name) > 1]:
            raise ValueError(f"model: {twice[0]} is given twice")
        if self.served_model_name and len(self.model) != 1 and not all("=" in name for name in self.served_model_name):
            raise ValueError("served_model_name: write MODEL=ALIAS[,ALIAS] with several models")
        if not all(self.api_key):
            raise ValueError("api_key: must not be empty")
        if any(str(key) == key.get_secret_value() for key in self.api_key):
            raise ValueError("api_key: the stars that --print-config writes are no key; write the key itself")
        has_keys = bool(self.keys())
        if self.separate_keys and not has_keys:
            raise ValueError("separate_keys: needs API keys (--api-key, --api-key-file)")
        if not is_loopback(self.host) and not has_keys and not self.insecure_no_auth:
            raise ValueError(
                f"host: {self.host} is wider than loopback; set an API key (--api-key, --api-key-file) or, where "
                "something else guards the port, --insecure-no-auth"
            )
        if problem := engines_problem(self.gpus, self.engines, self.device):
            raise ValueError(problem)
        return self

    @property
    def num_api_processes(self) -> int:
        """Number of API processes. "auto" counts as 1: where it means more, a number has replaced it."""
        return 1 if self.api_processes == "auto" else self.api_processes

    def keys(self) -> tuple[str, ...]:
        """All API keys, of the setting and of the file. ValueError for a file that cannot be read or holds none."""
        keys = [key.get_secret_value() for key in self.api_key]
        if self.api_key_file is not None:
            keys += keys_in(self.api_key_file)
        return tuple(keys)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags are the init arguments; load_settings wraps the file's values as `file`."""
        assert isinstance(init_settings, InitSettingsSource)
        flags = dict(init_settings.init_kwargs)
        file = flags.pop("file", {})
        return (
            InitSettingsSource(settings_cls, flags),
            Variables(settings_cls),
            InitSettingsSource(settings_cls, file),
        )


def load_settings(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Settings from the given flags, REPRISE_* variables and a YAML file (config or REPRISE_CONFIG). SettingsError
    names an unknown key, or every invalid one.
    """
    config = config or (Path(os.environ[ENV_PREFIX + "CONFIG"]) if os.environ.get(ENV_PREFIX + "CONFIG") else None)
    file = read_file(config) if config else {}
    for key in file:
        if key not in Settings.model_fields:
            raise SettingsError(f"{config}: unknown key {key!r}{suggestion(key, Settings.model_fields)}")
    try:
        return Settings(**{**(flags or {}), "file": file})
    except ValidationError as error:
        raise SettingsError("\n".join(explain(problem) for problem in error.errors())) from None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """REPRISE_* variables that are not settings, each with the name that may have been meant."""
    unknown = []
    for variable in sorted(environ):
        key = variable.removeprefix(ENV_PREFIX).lower()
        if variable.startswith(ENV_PREFIX) and key not in OTHER_VARIABLES and key not in Settings.model_fields:
            unknown.append(f"{variable}{suggestion(key, Settings.model_fields, ENV_PREFIX)}")
    return unknown
