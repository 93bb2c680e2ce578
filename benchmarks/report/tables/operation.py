"""Tables of how a server is operated: start, waking, overload, chat beside speech, several GPUs, Ray Serve."""

from __future__ import annotations

from benchmarks.commands import COMMANDS
from benchmarks.report.formatting import NAMES, number, percent, sourced_table
from benchmarks.report.results import Result, Results


def startup(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                NAMES[result.facts["model"]],
                number(result.facts["weight_bytes"] / 1e9),
                "full" if row["kernel_cache"] == "warm" else "empty",
                number(row["ready_s"]),
                number(row["load_s"]),
                number(row["capture_s"]),
                f"{row['captures_at_ready']} of {row['captures']}",
                number(row["captured_s"]),
            ]
            for row in result.rows
        ]

    head = ["model", "weights, GB", "kernel cache", "ready, s", "loading, s", "capturing, s", "captured when ready"]
    return sourced_table(
        results, [c.result for c in COMMANDS if c.result.startswith("startup_")], block, [*head, "all captured, s"]
    )


def waking(results: Results) -> str:
    """Each row is the worst of a result's rows, which differ by little."""

    def block(result: Result) -> list[list[str]]:
        row = max(result.rows, key=lambda row: row["first_s"])
        used = row["gpu_used_bytes"]
        asleep = (used["asleep"] - used["before"]) / 1e9
        cells = (row["first_s"], row["captured_s"], (used["awake"] - used["before"]) / 1e9, asleep)
        return [[NAMES[result.facts["model"]], *map(number, cells)]]

    head = ["model", "first token or sound, s", "all captured, s", "GPU memory awake, GB", "asleep, GB"]
    return sourced_table(results, ["waking_qwen2_vl_2b", "waking_voxcpm2"], block, head)


def overload(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                NAMES.get(result.facts["model"], "the embedded model"),
                str(result.facts["cpus"]),
                *(number(row[f"{name}_per_s"]) for name in ("capacity", "offered", "goodput")),
                percent(row["goodput_share"]),
                number(row["refusal_server_p99_ms"]),
                number(row["refusal_client_p99_ms"]),
            ]
            for row in result.rows
        ]

    head = ["model", "processors", "capacity, 1/s", "offered, 1/s", "good answers, 1/s", "of the capacity"]
    head += ["refusal in the API process, p99, ms", "at the client, p99, ms"]
    return sourced_table(results, ["overload_embedded", "overload_qwen2_vl_2b"], block, head)


def beside(results: Results) -> str:
    """Chat and speech on one GPU, alone and beside each other."""

    def block(result: Result) -> list[list[str]]:
        loads = {
            "chat": f"{number(result.facts['rate'])} chats/s",
            "speech": f"{result.facts['streams']} streams of speech",
        }
        rates = {"chat": ("tokens_per_s", "tokens/s"), "speech": ("audio_s_per_s", "audio-s/s")}
        found = []
        for row in sorted(result.rows, key=lambda row: (row["load"], row["beside"])):
            if not row["succeeded"]:
                continue
            key, unit = rates[row["load"]]
            times = ("first_p50_ms", "first_p95_ms", "first_p99_ms", "gap_p50_ms", "gap_p99_ms", "gap_max_ms")
            found.append(
                [
                    loads[row["load"]],
                    "beside the other" if row["beside"] else "alone",
                    f"{number(row[key])} {unit}",
                    *(number(row[name]) if name in row else "" for name in times),
                    str(row.get("streams_with_underrun", "")),
                    str(row["refused"] + row["failed"]),
                ]
            )
        return found

    head = ["load", "", "rate", "first token or sound, p50, ms", "p95, ms", "p99, ms", "ITL p50, ms", "p99, ms"]
    return sourced_table(
        results, ["beside_qwen2_vl_2b"], block, [*head, "longest, ms", "underruns", "refused or failed"]
    )


def gpus(results: Results) -> str:
    """Loads that are alike for each GPU, round by round."""

    def block(result: Result) -> list[list[str]]:
        found = []
        for row in result.rows:
            rate = "audio_s_per_s" if row["load"] == "speech" else "tokens_per_s"
            one = result.row(load=row["load"], round=row["round"], gpus=1)
            found.append(
                [
                    row["load"],
                    str(row["round"] + 1),
                    str(row["gpus"]),
                    str(row["at_once"]),
                    f"{number(row[rate])} {'audio-s' if row['load'] == 'speech' else 'tokens'}/s",
                    f"{row[rate] / one[rate]:.2f}",
                    number(row["first_p50_ms"]),
                    number(row["first_p95_ms"]),
                    f"{row['first_p95_ms'] / one['first_p95_ms']:.2f}",
                ]
            )
        return found

    head = ["load", "round", "GPUs", "open at once", "rate", "of one GPU's", "first token or sound, p50, ms", "p95, ms"]
    return sourced_table(results, ["engines_per_gpu"], block, [*head, "of one GPU's p95"])


def ray_hop(results: Results) -> str:
    """What Ray adds to a request, with its own proxy and with HAProxy."""

    def block(result: Result) -> list[list[str]]:
        proxy = "HAProxy" if result.name.endswith("haproxy") else "Ray's own"
        keys = ("direct_p25_ms", "through_ray_p25_ms", "hop_ms")
        return [[proxy, row["request"], *(number(row[key]) for key in keys)] for row in result.rows]

    head = ["proxy", "request", "direct, ms", "through Ray, ms", "Ray's part, ms"]
    return sourced_table(results, ["ray_hop", "ray_hop_haproxy"], block, head)
