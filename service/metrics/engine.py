"""Which metrics describe an engine. With several engines they have the label `engine`: its index, from 0."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from service.metrics.metrics import GROUPS, PREFIX
from service.metrics.page import Families, Family, Sample, families

OF_OTHERS = frozenset(
    {
        "time_to_first_token_seconds",
        "inter_token_duration_seconds",
        "time_to_first_audio_seconds",
        "spoken_first_audio_seconds",
        "audio_realtime_factor",
        "audio_chunk_gap_seconds",
        "audio_underrun_seconds",
        "audio_streams_total",
        "speech_characters_total",
        "speech_truncated_total",
        "audio_encode_duration_seconds",
        "built_in_voices_made_total",
        "ready",
        "api_process_restarts_total",
        "event_loop_lag_seconds",
        "event_loop_tasks",
        "build_info",
    }
)
"""Metrics of the groups below that are measured in the API process."""
GROUPS_OF_ENGINES = ("Phases of a chat request", "Steps and graphs", "Caches", "Load", "Speech", "Lifecycle")
OF_ENGINES = frozenset(spec.name for group in GROUPS_OF_ENGINES for spec in GROUPS[group]) - OF_OTHERS
_FAMILIES = frozenset(f"{PREFIX}_{name.removesuffix('_total')}" for name in OF_ENGINES)


def labelled(registry: CollectorRegistry, engine: int) -> Families:
    """The metrics of one of several engines."""
    return tuple(_with_label(family, engine) for family in families(registry) if family.name in _FAMILIES)


def without_engines(page: Families) -> Families:
    """The page of the other processes, without their empty metrics of engines."""
    return tuple(family for family in page if family.name not in _FAMILIES)


def _with_label(family: Family, engine: int) -> Family:
    samples = tuple(Sample(each.name, {"engine": str(engine), **each.labels}, each.value) for each in family.samples)
    return Family(family.name, family.kind, family.help, samples)
