"""Reprise on Ray Serve: one replica a GPU, behind fronts that route by picture.

    serve run deploy/ray/reprise.yaml

from the root of a checkout; in an installed package this module is reprise_server.ray_serve.app. Every setting of
`reprise serve` applies: as a variable where this is run, or below `settings` in the file.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.deployment import Application

from service.processes.config import supervised
from service.settings.reading import SettingsError
from service.settings.settings import load_settings

from .front import Front
from .replica import Replica
from .routing import LISTING_INTERVAL

SHUTDOWN_MARGIN = 10.0
"""Seconds beyond a replica's own draining until Ray kills it."""


class Arguments(BaseModel, extra="forbid"):
    gpus: float = Field(1, ge=0, description="GPUs of a replica; 0 runs it on the CPU.")
    cpus: float = Field(4, ge=0, description="CPUs that Ray reserves for a replica.")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(8, ge=1)
    work_per_replica: float = Field(32, gt=0, description="Waiting and running requests that a replica should have.")
    upscale_delay: float = Field(30, ge=0, description="Seconds of too much work before a replica is added.")
    downscale_delay: float = Field(600, ge=0, description="Seconds of too little work before one is given back.")
    fronts: int = Field(1, ge=1, description="Processes that pass requests on; they use no GPU.")
    settings: dict[str, Any] = Field({}, description="Settings of the server, as in its YAML file.")


def build(arguments: dict[str, Any]) -> Application:
    """The application. ValidationError or SettingsError for arguments that do not fit."""
    wanted = Arguments.model_validate(arguments)
    settings = load_settings(wanted.settings)
    if supervised(settings):
        raise SettingsError(
            "api_processes, gpus, engines: a replica has one of each; more replicas, or more fronts, share the load"
        )
    # Fronts send a replica requests until they have listed the replicas again.
    settings = settings.model_copy(update={"drain_delay": max(settings.drain_delay, 2 * LISTING_INTERVAL)})
    replicas = serve.deployment(
        Replica,
        ray_actor_options={"num_gpus": wanted.gpus, "num_cpus": wanted.cpus},
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_delay + settings.drain_timeout + SHUTDOWN_MARGIN,
        autoscaling_config=AutoscalingConfig(
            min_replicas=wanted.min_replicas,
            max_replicas=wanted.max_replicas,
            target_ongoing_requests=wanted.work_per_replica,
            upscale_delay_s=wanted.upscale_delay,
            downscale_delay_s=wanted.downscale_delay,
            policy=AutoscalingPolicy(policy_function=f"{__package__}.replica:replicas_for_work"),
        ),
    ).bind(settings)
    in_flight = settings.max_in_flight * wanted.max_replicas
    fronts = serve.deployment(
        serve.ingress()(Front),
        num_replicas=wanted.fronts,
        ray_actor_options={"num_cpus": 0.5},
        max_ongoing_requests=in_flight,
        graceful_shutdown_timeout_s=settings.drain_delay + settings.drain_timeout + SHUTDOWN_MARGIN,
    )
    return fronts.bind(settings, in_flight, replicas)
