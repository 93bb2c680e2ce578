// A conversation by voice, over the Realtime API: what the person says is transcribed, and the answer spoken.

import { toEnd } from "./answer.js";
import { brokenOff } from "./api.js";
import { openDevice } from "./camera.js";
import { receiver } from "./chat.js";
import { byId, explain, h, show } from "./dom.js";
import { chatFacts } from "./facts.js";
import { currentKey } from "./key.js";
import { hosted } from "./models.js";

const HEARD = "conversation.item.input_audio_transcription";
const PENDING = ".asked[aria-busy]"; // what was said and is not written down yet, in order
const HARMLESS = ["response_cancel_not_active", "input_audio_buffer_commit_empty", "item_not_found"]; // codes of errors
const error = byId("see-error");
let view;
let line = null; // { source: the microphone, socket, known: messages that the server has }
let speaking = false; // the person is
let spoken = 0; // when they last ended
let reply = null; // the answer that is being made: { written, sound, take, result, id: of its item }

/** given: functions of the view that shows the conversation. */
export function startTalk(given) {
  view = given;
  byId("talk").onclick = () => (line ? endTalk() : begin());
  byId("hands-free").onchange = listen;
  byId("chat-model").addEventListener("change", endTalk);
  const hold = byId("hold");
  hold.onpointerdown = () => speak(true);
  hold.onkeydown = ({ key }) => void (key === " " && speak(true)); // false would keep Tab from it
  hold.onkeyup = hold.onblur = release;
  for (const type of ["pointerup", "pointercancel"]) addEventListener(type, release);
}

export function endTalk() {
  if (!line) return;
  if (reply) finish("stopped");
  view.stop();
  const { source, socket } = line;
  line = null;
  speaking = false;
  source.context.close();
  for (const track of source.mediaStream.getTracks()) track.stop();
  socket.onclose = socket.onmessage = null;
  socket.close();
  for (const question of document.querySelectorAll(PENDING)) question.remove();
  view.begun();
  draw();
}

async function begin() {
  show(error, "");
  byId("talk").disabled = true;
  if (hosted.chat && hosted.speech && !byId("aloud").checked) byId("aloud").click();
  try {
    const key = await currentKey();
    if (!/^[\w!#$%&'*+.^`|~-]*$/.test(key)) throw new Error("Browsers cannot send such a key over a WebSocket.");
    line = { source: await openMicrophone(), socket: connect(key), known: new WeakSet() };
  } catch (problem) {
    show(error, explain(problem));
  }
  byId("talk").disabled = false;
}

async function openMicrophone() {
  const stream = await openDevice({ audio: { echoCancellation: true } }, "microphone");
  const context = new AudioContext();
  await context.audioWorklet.addModule("page/worklet.js");
  const source = context.createMediaStreamSource(stream);
  const tap = new AudioWorkletNode(context, "pcm16", { channelCount: 1, channelCountMode: "explicit" });
  tap.port.onmessage = ({ data }) => {
    if (!speaking && !handsFree()) return;
    send("input_audio_buffer.append", { audio: btoa(String.fromCharCode(...new Uint8Array(data.buffer))) });
  };
  source.connect(tap).connect(context.destination); // silent, but what leads nowhere may not run
  return source;
}

function connect(key) {
  const asked = hosted.chat ? { model: hosted.chat.id } : { model: hosted.transcription.id, intent: "transcription" };
  const url = new URL(`v1/realtime?${new URLSearchParams(asked)}`, document.baseURI);
  const protocols = ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])];
  const socket = new WebSocket(url.href.replace(/^http/, "ws"), protocols);
  socket.onopen = listen;
  socket.onmessage = ({ data }) => take(JSON.parse(data));
  socket.onclose = ({ reason }) => {
    endTalk();
    if (error.hidden && reason !== "idle") show(error, explain(brokenOff("conversation")));
  };
  return socket;
}

function send(type, fields) {
  if (line?.socket.readyState === WebSocket.OPEN) line.socket.send(JSON.stringify({ type, ...fields }));
}

const TAKEN = {
  "input_audio_buffer.speech_started": () => speak(true),
  "input_audio_buffer.speech_stopped": () => speak(false),
  "input_audio_buffer.committed": committed,
  [`${HEARD}.completed`]: ({ item_id: id, transcript }) => heard(id, transcript),
  [`${HEARD}.failed`]: ({ item_id: id, error: problem }) => heard(id, "", problem),
  "response.output_item.added": ({ item }) => (reply.id = item.id),
  "response.output_text.delta": ({ delta }) => reply.take({ content: delta }),
  "response.output_audio_transcript.delta": ({ delta }) => reply.take({ content: delta }),
  "response.output_audio.delta": ({ delta }) => reply.take({ audio: { data: delta } }),
  "response.done": ({ response }) => done(response),
  error: ({ error: problem }) => refused(problem),
};

const take = (event) => TAKEN[event.type]?.(event);
const handsFree = () => byId("hands-free").checked;

/** Says who finds the end of a turn, the server or the button. */
function listen() {
  const turn_detection = handsFree() ? { type: "server_vad", create_response: false } : null;
  const input = { transcription: { model: hosted.transcription.id }, turn_detection };
  send("session.update", { session: { type: hosted.chat ? "realtime" : "transcription", audio: { input } } });
  send("input_audio_buffer.clear");
  speaking = false;
  draw();
}

function draw() {
  byId("talk").setAttribute("aria-pressed", String(Boolean(line)));
  byId("talking").hidden = !line;
  byId("hold").disabled = handsFree();
  byId("hold").setAttribute("aria-pressed", String(speaking));
  byId("hold").textContent = speaking ? "Hearing you" : handsFree() ? "Listening" : "Hold to talk";
}

/** Who begins to speak interrupts what is said to them. */
function speak(begins) {
  if (speaking === begins) return;
  speaking = begins;
  spoken = performance.now();
  if (begins) view.stop();
  draw();
}

function release() {
  if (!speaking || handsFree()) return;
  speak(false);
  send("input_audio_buffer.commit");
}

function committed() {
  byId("turns").append(h("li", { class: "asked", "aria-busy": "true" }, "…"));
  view.begun();
  toEnd();
}

/** What was said becomes a turn. */
function heard(id, text, problem) {
  if (problem) show(error, explain(problem));
  document.querySelector(PENDING).remove();
  const message = text && view.addQuestion(text).message;
  view.begun();
  if (!hosted.chat) return;
  const news = view.messages().filter((one) => !line.known.has(one));
  // The server has the words, but not the pictures with them, nor what was written meanwhile.
  if (!message || news.length > 1 || message.content.length > 1) {
    send("conversation.item.delete", { item_id: id });
    for (const one of news) send("conversation.item.create", { item: item(one) });
  }
  for (const one of news) line.known.add(one);
  if (!speaking && !reply && view.messages().at(-1)?.role === "user") respond(); // also to what noise came after
}

/** A message as the Realtime API has it. */
function item({ role, content }) {
  if (role === "assistant") return { type: "message", role, content: [{ type: "output_text", text: content }] };
  const parts = content.map(({ text = "(a video that is not shown)", image_url: picture }) =>
    picture ? { type: "input_image", image_url: picture.url } : { type: "input_text", text },
  );
  return { type: "message", role, content: parts };
}

function respond() {
  const answer = view.beginAnswer(() => cut(answer));
  reply = Object.assign(answer, receiver({ sent: spoken, ...answer }));
  view.busy({ abort: () => send("response.cancel") });
  const response = { output_modalities: [reply.sound ? "audio" : "text"], instructions: byId("system").value.trim() };
  response.temperature = byId("temperature").valueAsNumber; // JSON has null for none
  if (reply.sound) response.audio = { output: view.speech() };
  send("response.create", { event_id: "reply", response });
}

function done({ status, status_details: details, usage }) {
  if (status === "failed") show(error, explain(details.error));
  if (status === "failed" || status === "cancelled") return finish(status === "failed" ? "broken off" : "stopped");
  if (status === "incomplete") reply.result.finish = "length";
  const { input_tokens: prompt_tokens, input_token_details: prompt_tokens_details } = usage;
  const { output_tokens: completion_tokens, output_token_details: completion_tokens_details } = usage;
  reply.result.usage = { prompt_tokens, prompt_tokens_details, completion_tokens, completion_tokens_details };
  finish(chatFacts(reply.result, 0));
}

/** No more of the answer comes. */
function finish(facts) {
  const { written, sound, result } = reply;
  reply = null;
  sound?.finish();
  written.end(facts);
  if (result.sound) written.sounded({ ...result.sound, gaps: sound.gaps });
  view.busy(null);
  if (!written.text) return written.element.remove();
  const message = { role: "assistant", content: written.text };
  view.messages().push(message);
  line.known.add(message);
}

/** The sound of an answer has ended. If it was stopped, the model forgets what was not heard. */
function cut({ written, sound: { player }, id }) {
  if (!player.stopped) return;
  written.facts.prepend("interrupted · ");
  const audio_end_ms = Math.floor(1000 * player.heard);
  if (id) send("conversation.item.truncate", { item_id: id, content_index: 0, audio_end_ms });
}

function refused(problem) {
  if (HARMLESS.includes(problem.code)) return;
  show(error, explain(problem));
  if (problem.event_id === "reply") finish("");
}
