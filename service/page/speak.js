// The view that speaks: a text, its voice, its sound.

import { startClone } from "./clone.js";
import { byId, explain, explainField, h, setOptions, show } from "./dom.js";
import { speechFacts } from "./facts.js";
import { hosted } from "./models.js";
import { Player } from "./player.js";
import { hush } from "./sound.js";
import { file, FORMATS, speak } from "./speech.js";
import { deleteVoice, voices } from "./voices.js";
import { Waveform } from "./waveform.js";

const error = byId("speak-error");
const facts = byId("speech-facts");
const NAMES = { voice: "Voice", instructions: "Description", speed: "Speed", seed: "Seed" };
let waveform;
let running = null; // AbortController of the speech that is being made or the file that is being fetched
let player = null;
let spoken = null; // { fields, pieces }: what was spoken last, for playing again and for files

export function startSpeak() {
  waveform = new Waveform(byId("waveform"));
  setOptions(byId("format"), FORMATS.map((format) => ({ value: format, label: format })));
  byId("speaker").addEventListener("submit", (event) => {
    event.preventDefault();
    say();
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) say();
  });
  byId("stop-speech").onclick = stop;
  byId("again").onclick = again;
  byId("download").onclick = download;
  byId("voice").onchange = aboutVoice;
  byId("delete-voice").onclick = forgetVoice;
  startClone((voice) => {
    byId("voice").value = voice.id;
    aboutVoice();
    byId("text").focus();
  });
}

export function aboutVoice() {
  const voice = voices.all.find(({ id }) => id === byId("voice").value);
  byId("delete-voice").hidden = voice?.type !== "uploaded";
  const length = voice?.seconds ? `Made from a clip of ${voice.seconds.toFixed(1)} s.` : "";
  byId("voice-about").textContent = voice?.description ?? length;
}

function stop() {
  running?.abort();
  player?.stop();
}

function fieldsOf(input) {
  const speed = byId("speed").value;
  const fields = { model: hosted.speech.id, input, voice: byId("voice").value, speed: speed === "" ? 1 : Number(speed) };
  const manner = byId("manner").value.trim();
  if (manner) fields.instructions = manner;
  const seed = byId("seed").value;
  fields.seed = seed === "" ? Math.floor(Math.random() * 2 ** 31) : Number(seed);
  return fields;
}

function begin(progress) {
  stop();
  hush();
  show(error, "");
  player = new Player({ onProgress: (seconds) => waveform.progress(seconds), onEnd: () => busy(false) });
  busy(true);
  facts.textContent = progress;
}

function busy(on) {
  const focused = document.activeElement;
  byId("say").hidden = on;
  byId("stop-speech").hidden = !on;
  const ready = !on && spoken !== null;
  for (const id of ["again", "download", "format"]) byId(id).hidden = !ready;
  if (focused?.hidden) byId(on ? "stop-speech" : "say").focus(); // the keyboard does not lose its place
}

async function say() {
  const input = byId("text").value.trim();
  if (!hosted.speech) return;
  if (!input) {
    show(error, "There is no text to speak.");
    byId("text").focus();
    return;
  }
  begin("");
  const mine = player;
  const made = { fields: fieldsOf(input), pieces: [] };
  spoken = null;
  waveform.reset();
  running = new AbortController();
  const onAudio = (samples, rate) => {
    mine.push(samples, rate);
    made.pieces.push({ samples, rate });
    waveform.push(samples, rate);
  };
  try {
    const result = await speak({ fields: made.fields, signal: running.signal, onAudio });
    facts.textContent = `${speechFacts(result)} · seed ${made.fields.seed}`;
    spoken = made;
    mine.finish();
  } catch (problem) {
    if (mine !== player) return; // another text is spoken
    show(error, explainField(problem, NAMES));
    facts.textContent = problem.name === "AbortError" ? "stopped" : "";
    mine.stop();
  }
}

function again() {
  begin(facts.textContent);
  waveform.progress(0);
  for (const { samples, rate } of spoken.pieces) player.push(samples, rate);
  player.finish();
}

async function download() {
  show(error, "");
  const button = byId("download");
  button.disabled = true;
  running = new AbortController();
  try {
    const { blob, name } = await file({ fields: spoken.fields, format: byId("format").value, signal: running.signal });
    const url = URL.createObjectURL(blob);
    h("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  } catch (problem) {
    show(error, explain(problem));
  } finally {
    button.disabled = false;
  }
}

async function forgetVoice() {
  show(error, "");
  const { value, selectedOptions } = byId("voice");
  if (!confirm(`Delete the voice ${selectedOptions[0].textContent} from the server, for everybody?`)) return;
  try {
    await deleteVoice(value);
    aboutVoice();
    byId("voice").focus();
  } catch (problem) {
    show(error, explain(problem));
  }
}
