"""Single figures of benchmarks/results, of a row or each read when it is asked for; then all raise Missing where it is
not measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.report.results import Missing, Result, Results
from benchmarks.roofline.decoders import full_size_prefill_floor

Figure = Callable[[Results], float]
Peer = Callable[[Results], float | str]


def floor_ms(row: dict[str, Any]) -> float:
    """Roofline of an encoder pass, a decode step or a prefill; results of prefills did not always have it."""
    return float(row["floor_ms"]) if "floor_ms" in row else 1e3 * full_size_prefill_floor(row["model"], row["rows"])


def over_floor(row: dict[str, Any]) -> float:
    """Multiple of the roofline: of the step, or of its bare graph where that alone was timed."""
    return float(row.get("replay_ms", row["graph_ms"])) / floor_ms(row)


def of_bfloat16(result: Result, row: dict[str, Any]) -> float:
    """Time of a row with weights in e4m3, divided by that with bfloat16 ones; of bare graphs where only those were
    timed."""
    plain = result.row(quantization="none", kind=row["kind"], rows=row["rows"])
    key = "replay_ms" if "replay_ms" in row and "replay_ms" in plain else "graph_ms"
    return float(row[key] / plain[key])


def gpu_busy(row: dict[str, Any]) -> float | None:
    """The share of a load's time in which steps ran (older results: steps_share); None where it is not told."""
    share: float | None = row.get("gpu_busy_share", row.get("steps_share"))
    return share


def of_row(result: str, key: str, **wanted: object) -> Figure:
    def figure(results: Results) -> float:
        row = results[result].row(**wanted)
        if row.get(key) is None:
            raise Missing(result, key)
        return float(row[key])

    return figure


def speech(streams: int, key: str) -> Figure:
    return of_row("speech_http_closed", key, streams=streams)


def nano(metric: str, batch: int) -> Figure:
    return lambda results: results.peer_value("nano-vllm-voxcpm", metric, batch=batch)


def chat(result: str, key: str, **wanted: object) -> Figure:
    return of_row(f"chat_http_{result}", key, **wanted)


def vllm(metric: str, **wanted: object) -> Figure:
    return lambda results: results.peer_value("vllm", metric, mode="graphs+mmgraph", **wanted)


def vllm_step(batch: int) -> Figure:
    """The better of its two starts."""
    modes = ("graphs", "graphs+mmgraph")
    return lambda results: min(
        float(results.peer("vllm", "decode_tps", batch=batch, mode=mode)["ms_per_step"]) for mode in modes
    )


def multiple(result: str, **wanted: object) -> Figure:
    """Of the roofline: a step through the runner, or its bare graph where that alone was timed."""
    return lambda results: over_floor(results[result].row(**wanted))


def peers_multiple(peer: Figure, result: str, **wanted: object) -> Figure:
    """A peer's milliseconds as a multiple of the same roofline."""
    return lambda results: peer(results) / floor_ms(results[result].row(**wanted))


def worst_multiple(result: str, rows: tuple[int, ...]) -> Figure:
    """Of the roofline: the worst of a model's decode steps of these numbers of rows."""
    return lambda results: max(multiple(result, kind="decode", rows=each)(results) for each in rows)


def prefill_ms(result: str, tokens: int) -> Figure:
    def figure(results: Results) -> float:
        row = results[result].row(kind="prefill", rows=tokens)
        return float(row.get("replay_ms", row["graph_ms"]))

    return figure


def speech_multiple(streams: int) -> Figure:
    def figure(results: Results) -> float:
        row = results["speech_steps"].row(streams=streams)
        return float(row["decode_ms"] / row["floor_ms"])

    return figure


def most_padding(models: tuple[str, ...]) -> Figure:
    """Per cent of the patches of an encoder pass, the most of any input."""

    def figure(results: Results) -> float:
        rows = [row for model in models for row in results[f"encoder_{model}"].rows]
        return 100 * max(float(row["padding"]) for row in rows if "padding" in row)

    return figure


def fp8(model: str) -> Figure:
    """Milliseconds of a decode step of one row with weights in e4m3."""
    return of_row(f"quantization_decode_{model}", "replay_ms", quantization="fp8", kind="decode", rows=1)


def fp8_most(model: str) -> Figure:
    """Time of a step or prefill with weights in e4m3 as a share of that in bfloat16, the largest of all sizes."""

    def figure(results: Results) -> float:
        result = results[f"quantization_decode_{model}"]
        return max(of_bfloat16(result, row) for row in result.rows if row["quantization"] == "fp8")

    return figure


def lora(streams: int, variant: str) -> Figure:
    """Per cent that a decode step takes longer than the graph without adapters."""
    return lambda results: 100 * of_row("lora", "over_base", streams=streams, variant=variant)(results)


def mp3(streams: int, key: str) -> Figure:
    return of_row("speech_http_mp3", key, streams=streams)


def arrivals(key: str) -> Figure:
    return of_row("chat_http_arrivals_qwen2_vl_7b", key, rate=36)


def highest(name: str) -> Figure:
    """Of the loads that were sustained."""
    return lambda results: max((float(row["rate"]) for row in results[name].rows if row["sustained"]), default=0.0)


def listeners_of(results: Results) -> list[Result]:
    """Of live listeners, one number of them or several in each; `..._before` is earlier code, to compare with."""
    return [one for one in results.variants("speech_http_listeners") if not one.name.endswith("_before")]


def held_listeners(results: Results) -> float:
    """The highest number of live listeners that all of its runs held."""
    held: dict[float, bool] = {}
    for result in listeners_of(results):
        for row in result.rows:
            number = float(row["listeners"])
            held[number] = held.get(number, True) and bool(row["sustained"])
    return max((number for number, all_runs in held.items() if all_runs), default=0.0)


def start(model: str, cache: str) -> Figure:
    """The slowest of the starts."""

    def slowest(results: Results) -> float:
        return max(float(row["ready_s"]) for row in results[f"startup_{model}"].rows if row["kernel_cache"] == cache)

    return slowest


def starts(engine: str) -> Peer:
    """Least and largest start of a peer."""

    def span(results: Results) -> float | str:
        times = results.peer_notes(engine, "start_s")
        return times[0] if len(times) == 1 else f"{min(times):.0f} to {max(times):.0f} s"

    return span


def graph_gigabytes(name: str) -> Figure:
    return lambda results: results[name].facts["graph_bytes"] / 1e9
