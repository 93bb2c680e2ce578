// The view for operators: the server's state, models, load, latencies, caches and memory.

import { getJson, LIMIT, request, stateOf } from "./api.js";
import { byId, explain, h, show } from "./dom.js";
import { count, duration } from "./facts.js";
import { growth, quantile, rate, Reading } from "./metrics.js";
import { hosted } from "./models.js";
import { Plot } from "./plot.js";

const PERIOD = 2; // s between readings
const SPAN = 300; // s that are kept and drawn
const WINDOW = 60; // s over which latencies and shares are taken
const FAILING = new Set([503]); // /ready and /health say so with this status

const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const percent = (value) => (value === null ? "–" : `${number(100 * value)} %`);
const bytes = (value) =>
  value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${(value / 2 ** 20).toFixed(value < 2 ** 24 ? 1 : 0)} MiB`;

/** A plot's lines, as functions of the newest reading, the one before, and one of a minute ago. */
const PLOTS = [
  {
    title: "Requests",
    format: number,
    lines: { running: (now) => now.sum("requests_running"), waiting: (now) => now.sum("requests_waiting") },
  },
  {
    title: "Chat",
    kind: "chat",
    format: (value) => `${number(value)}/s`,
    lines: { tokens: (now, last) => rate(now, last, "generated_tokens_total") },
  },
  {
    title: "Time to first token",
    kind: "chat",
    format: duration,
    lines: {
      p50: (now, _, minute) => quantile(now, minute, "time_to_first_token_seconds", 0.5),
      p95: (now, _, minute) => quantile(now, minute, "time_to_first_token_seconds", 0.95),
    },
  },
  {
    title: "Inter-token latency",
    kind: "chat",
    format: duration,
    lines: {
      p50: (now, _, minute) => quantile(now, minute, "inter_token_duration_seconds", 0.5),
      p95: (now, _, minute) => quantile(now, minute, "inter_token_duration_seconds", 0.95),
    },
  },
  {
    title: "Speech, seconds of sound",
    kind: "speech",
    format: (value) => `${number(value)}/s`,
    lines: { "": (now, last) => rate(now, last, "audio_generated_seconds_total") },
  },
  {
    title: "Time to first audio",
    kind: "speech",
    format: duration,
    lines: {
      p50: (now, _, minute) => quantile(now, minute, "time_to_first_audio_seconds", 0.5),
      p95: (now, _, minute) => quantile(now, minute, "time_to_first_audio_seconds", 0.95),
    },
  },
  {
    title: "Steps",
    format: (value) => `${number(value)}/s`,
    lines: {
      replayed: (now, last) => rate(now, last, "steps_total", { route: "replay" }),
      eager: (now, last) => rate(now, last, "steps_total", { route: "eager" }),
    },
  },
  {
    title: "KV cache in use",
    format: percent,
    lines: {
      "": (now) => share(now.sum("kv_cache_pages", { state: "used" }), now.sum("kv_cache_pages", { state: "total" })),
    },
  },
  {
    title: "GPU memory",
    metric: "gpu_memory_bytes",
    format: bytes,
    unit: 2 ** 20,
    lines: {
      tensors: (now) => now.sum("gpu_memory_bytes", { state: "tensors" }),
      graphs: (now) => now.sum("graph_bytes"),
      free: (now) => now.sum("gpu_memory_bytes", { state: "free" }),
    },
  },
  {
    title: "Memory of the API process",
    format: bytes,
    unit: 2 ** 20,
    lines: { "": (now) => now.sum("process_resident_memory_bytes") },
  },
];

let readings = [];
let plots = null;
let timer = null;
let reading = false; // it may take longer than PERIOD
let drawn = -Infinity; // readings that the plots show, by the time of the last; those of the past have negative times

/** Begins or ends reading. */
export function watch(on) {
  clearTimeout(timer);
  timer = null;
  if (on) read();
}

async function read() {
  timer = setTimeout(read, PERIOD * 1000);
  if (document.hidden || reading) return;
  reading = true;
  const options = { limit: LIMIT, accept: (status) => FAILING.has(status) };
  try {
    const [text, ready, health, version] = await Promise.all([
      request("metrics", { limit: LIMIT }).then((response) => response.text()),
      getJson("ready", options),
      getJson("health", options),
      getJson("version", { limit: LIMIT }),
    ]);
    if (!readings.length) readings = await past();
    readings.push(new Reading(text));
    readings = readings.filter(({ time }) => time >= readings.at(-1).time - SPAN);
    show(byId("watch-error"), "");
    draw(ready, health, version);
  } catch (problem) {
    show(byId("watch-error"), explain(problem));
    if (problem.status === 401) clearTimeout(timer); // opening the view again asks for the key again
  } finally {
    reading = false;
  }
}

/** What the server has kept from before this view was opened. */
async function past() {
  const now = performance.now() / 1000;
  return (await getJson("metrics/history", { limit: LIMIT })).map(({ age, metrics }) => new Reading(metrics, now - age));
}

function draw(ready, health, { version }) {
  const now = readings.at(-1);
  const minute = readings.find(({ time }) => time > now.time - WINDOW - PERIOD); // not those before a pause
  const device = now.of("engine_info")[0]?.labels.device ?? "–";
  byId("overview").replaceChildren(
    tile("State", stateOf(ready), ready.status === "ready" ? "good" : "bad"),
    ...background(ready.background ?? {}),
    tile("Runs on", device === "cpu" ? "CPU" : device),
    tile("Requests, last minute", number(growth(now, minute, "requests_total"))),
    tile("Refused, last minute", number(growth(now, minute, "admission_rejections_total"))),
    tile("Engine restarts", number(health.restarts), health.restarts ? "bad" : ""),
    tile("Version", version),
  );
  byId("hosted").replaceChildren(...hosted.all.map((model) => card(model, device, now, minute)));
  if (hosted.all.length) plots ??= makePlots(now); // which plots there are depends on the models
  if (!plots) return;
  readings.forEach((one, index) => {
    if (one.time <= drawn) return;
    const before = readings.find(({ time }) => time > one.time - WINDOW - PERIOD);
    for (const { plot, lines } of plots) plot.add(one.time, lines.map((line) => line(one, readings[index - 1], before)));
  });
  drawn = now.time;
}

function makePlots(now) {
  const shown = PLOTS.filter(
    ({ kind, metric }) => (!kind || hosted.all.some((model) => model.kind === kind)) && (!metric || now.of(metric).length),
  );
  return shown.map(({ title, format, unit, lines }) => {
    const plot = new Plot({ title, series: Object.keys(lines), format, unit, span: SPAN });
    byId("plots").append(plot.element);
    return { plot, lines: Object.values(lines) };
  });
}

/** What still runs while there are no requests. */
function background({ captures_left: captures }) {
  return captures ? [tile("Left in the background", count(captures, "capture"))] : [];
}

function tile(name, value, mark = "") {
  return h("div", { class: `tile ${mark}` }, h("span", {}, name), h("b", {}, value));
}

function share(part, whole) {
  return whole ? part / whole : null;
}

/** One model: what it holds now, and shares over a minute. */
function card(model, device, now, minute) {
  const where = { model: model.id };
  const used = now.sum("kv_cache_usage_ratio", where) ?? 0;
  const grown = (name, more) => growth(now, minute, name, { ...where, ...more });
  const steps = grown("steps_total");
  const facts = [
    ["running", number(now.sum("requests_running", where) ?? 0)],
    ["waiting", number(now.sum("requests_waiting", where) ?? 0)],
    ["context", `${number(model.max_model_len)} tokens`],
  ];
  if (device !== "cpu") facts.push(["steps replayed", percent(share(grown("steps_total", { route: "replay" }), steps))]);
  if (model.kind !== "speech") {
    const hits = grown("encoder_cache_hits_total");
    const looked = grown("prefix_cache_query_tokens_total");
    facts.push(
      ["from the prefix cache", percent(share(grown("prefix_cache_hit_tokens_total"), looked))],
      ["from the encoder cache", percent(share(hits, hits + grown("encoder_cache_misses_total")))],
    );
  } else {
    const late = grown("audio_streams_total", { underrun: "true" });
    facts.push(
      ["real-time factor, p50", words(quantile(now, minute, "audio_realtime_factor", 0.5, where))],
      ["streams with a gap", percent(share(late, grown("audio_streams_total")))],
    );
  }
  return h("article", { class: "card" },
    h("h2", {}, model.id, " ", h("span", { class: "kind" }, DOES[model.kind] ?? model.kind)),
    h("dl", {}, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("label", { class: "meter" }, `KV cache ${percent(used)}`, h("meter", { min: 0, max: 1, high: 0.9, value: used })),
  );
}

const DOES = { chat: "sees", speech: "speaks", transcription: "hears" };
const words = (value) => (value === null ? "–" : value.toFixed(2));
