// A conversation by voice, over the Realtime API: what the person says is transcribed, and the answer spoken.

import { toEnd } from "./answer.js";
import { brokenOff } from "./api.js";
import { Incoming } from "./chat.js";
import { byId, explain, h, show } from "./dom.js";
import { chatFacts } from "./facts.js";
import { currentKey } from "./key.js";
import { openMicrophone } from "./microphone.js";
import { hosted } from "./models.js";

const HEARD = "conversation.item.input_audio_transcription";
const REPLY = "reply"; // id of the event that asks for an answer
const HARMLESS = ["response_cancel_not_active", "input_audio_buffer_commit_empty", "item_not_found"]; // codes of errors
const error = byId("see-error");
let view;
let line = null; // { socket, closeMicrophone, known: messages that the server has, asked, answered: by the id of their item }
let speaking = false; // the person is
let spoken = 0; // when they last ended
let reply = null; // the answer that is being made: { written, sound, incoming, item }

/**
 * given: messages(), of the conversation, in the API's form; ask(text): adds a question, with what is attached;
 * answer(onSilence): { written, sound } of the next answer; fields(): instructions and temperature; speech(): model and
 * voice; stop(): ends an answer; busy(cancel): one is being made, null: none is; begun(): shows whether there are turns.
 */
export function startTalk(given) {
  view = given;
  byId("talk").onclick = () => (line ? end() : begin());
  byId("hands-free").onchange = listen;
  byId("chat-model").addEventListener("change", renewTalk);
  const hold = byId("hold");
  hold.onpointerdown = ({ pointerId }) => {
    hold.setPointerCapture(pointerId);
    press();
  };
  hold.onkeydown = ({ key, repeat }) => {
    if (key === " " && !repeat) press();
  };
  hold.onlostpointercapture = hold.onkeyup = hold.onblur = release;
  hold.oncontextmenu = (event) => event.preventDefault(); // of a long touch
}

/** Goes on with another conversation or model. */
export function renewTalk() {
  if (!line) return;
  end();
  begin();
}

const handsFree = () => byId("hands-free").checked;

async function begin() {
  show(error, "");
  byId("talk").disabled = true;
  if (hosted.chat && hosted.speech && !byId("aloud").checked) byId("aloud").click();
  let closeMicrophone = () => {};
  try {
    closeMicrophone = await openMicrophone((audio) => {
      if (line && (speaking || handsFree())) send("input_audio_buffer.append", { audio });
    });
    line = { socket: await connect(), closeMicrophone, known: new WeakSet(), asked: new Map(), answered: new Map() };
    listen();
    byId("hold").focus();
  } catch (problem) {
    closeMicrophone();
    show(error, explain(problem));
  }
  byId("talk").disabled = false;
}

async function connect() {
  const key = await currentKey();
  if (!/^[\w!#$%&'*+.^`|~-]*$/.test(key)) throw new Error("Browsers cannot send a key with such letters along with sound.");
  const asked = hosted.chat ? { model: hosted.chat.id } : { model: hosted.transcription.id, intent: "transcription" };
  const url = new URL(`v1/realtime?${new URLSearchParams(asked)}`, document.baseURI);
  const keys = key ? [`openai-insecure-api-key.${key}`] : [];
  const socket = new WebSocket(url.href.replace(/^http/, "ws"), ["realtime", ...keys]);
  socket.onmessage = ({ data }) => take(JSON.parse(data));
  await new Promise((resolve, reject) => {
    socket.onopen = resolve;
    socket.onclose = () => reject(brokenOff("conversation"));
  });
  socket.onclose = ({ reason }) => {
    end();
    if (error.hidden && reason !== "idle") show(error, explain(brokenOff("conversation")));
  };
  return socket;
}

function end() {
  const { socket, closeMicrophone, asked } = line;
  if (reply) finish("stopped");
  view.stop();
  socket.onclose = socket.onmessage = null;
  socket.close();
  closeMicrophone();
  for (const question of asked.values()) question.remove();
  line = null;
  speaking = false;
  view.begun();
  draw();
}

function send(type, fields) {
  line.socket.send(JSON.stringify({ type, ...fields }));
}

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
  const state = handsFree() ? byId("listening") : byId("hold");
  byId("hold").hidden = handsFree();
  byId("listening").hidden = !handsFree();
  byId("hold").setAttribute("aria-pressed", String(speaking));
  state.textContent = speaking ? "Hearing you" : handsFree() ? "Listening" : "Hold to talk";
}

function press() {
  if (!speaking) speak(true);
}

function release() {
  if (!speaking || handsFree()) return;
  speak(false);
  send("input_audio_buffer.commit");
}

/** Who begins to speak interrupts what is said to them. */
function speak(begins) {
  speaking = begins;
  if (begins) {
    show(error, "");
    view.stop();
  } else spoken = performance.now();
  draw();
}

function take(event) {
  switch (event.type) {
    case "input_audio_buffer.speech_started":
      return speak(true);
    case "input_audio_buffer.speech_stopped":
      return speak(false);
    case "input_audio_buffer.committed":
      return committed(event.item_id);
    case `${HEARD}.delta`:
      return line.asked.get(event.item_id).lastChild.append(event.delta);
    case `${HEARD}.completed`:
      return heard(event.item_id, event.transcript);
    case `${HEARD}.failed`:
      show(error, explain(event.error));
      return heard(event.item_id, "");
    case "response.output_item.added":
      reply.item = event.item.id;
      return;
    case "response.output_text.delta":
    case "response.output_audio_transcript.delta":
      return reply.incoming.addText(event.delta);
    case "response.output_audio.delta":
      return reply.incoming.addAudio(event.delta);
    case "response.done":
      return done(event.response);
    case "conversation.item.retrieved":
      return shorten(event.item);
    case "error":
      return refused(event.error);
  }
}

/** What was said becomes a turn. */
function committed(id) {
  const question = h("li", { class: "asked", "aria-busy": "true" }, h("p", { dir: "auto" }));
  line.asked.set(id, question);
  byId("turns").append(question);
  view.begun();
  toEnd();
}

function heard(id, text) {
  line.asked.get(id).remove();
  line.asked.delete(id);
  const message = text && view.ask(text);
  view.begun();
  if (!hosted.chat) return;
  const news = view.messages().filter((one) => !line.known.has(one));
  // The server has the words, but not the pictures with them, nor what was written meanwhile.
  if (!message || news.length > 1 || message.content.length > 1) {
    send("conversation.item.delete", { item_id: id });
    for (const one of news) send("conversation.item.create", { item: item(one) });
  }
  for (const one of news) line.known.add(one);
  if (message && !speaking) respond();
}

/** A message as the Realtime API has it, which takes no videos. */
function item({ role, content }) {
  if (role === "assistant") return { type: "message", role, content: [{ type: "output_text", text: content }] };
  const parts = content.map(({ type, text, image_url: picture }) => {
    if (picture) return { type: "input_image", image_url: picture.url };
    return { type: "input_text", text: type === "text" ? text : "(a video that is not shown)" };
  });
  return { type: "message", role, content: parts };
}

function respond() {
  const made = view.answer(() => cut(made));
  const { written, sound } = made;
  made.incoming = new Incoming({
    sent: spoken,
    onText: (added) => written.addText(added),
    onAudio: (samples, rate) => sound.push(samples, rate),
  });
  reply = made;
  view.busy(() => send("response.cancel"));
  const response = { ...view.fields(), output_modalities: [sound ? "audio" : "text"] };
  if (sound) response.audio = { output: view.speech() };
  send("response.create", { event_id: REPLY, response });
}

function done({ status, status_details: details, usage }) {
  const { result } = reply.incoming;
  if (status === "failed") show(error, explain(details.error));
  if (status === "failed" || status === "cancelled") return finish(status === "failed" ? "broken off" : "stopped");
  result.usage = {
    prompt_tokens: usage.input_tokens,
    prompt_tokens_details: usage.input_token_details,
    completion_tokens: usage.output_tokens,
    completion_tokens_details: usage.output_token_details,
  };
  if (status === "incomplete") result.finish = "length";
  finish(chatFacts(result, 0));
}

/** No more of the answer comes. */
function finish(facts) {
  const { written, sound, incoming, item: id } = reply;
  reply = null;
  sound?.finish();
  written.end(facts);
  if (incoming.result.sound) written.sounded({ ...incoming.result.sound, gaps: sound.gaps });
  view.busy(null);
  if (!written.text) return written.element.remove();
  const message = { role: "assistant", content: written.text };
  view.messages().push(message);
  line.known.add(message);
  line.answered.set(id, { written, message });
}

/** The sound of an answer has ended. If it was stopped, the model forgets what was not heard. */
function cut({ sound, item: id }) {
  if (!line || !id || !sound.player.stopped) return;
  const audio_end_ms = Math.floor(1000 * sound.player.heard);
  send("conversation.item.truncate", { item_id: id, content_index: 0, audio_end_ms });
  send("conversation.item.retrieve", { item_id: id });
}

function shorten({ id, content }) {
  const { written, message } = line.answered.get(id);
  message.content = content[0].transcript ?? "";
  written.cut(message.content);
  if (!message.content) view.messages().splice(view.messages().indexOf(message), 1);
}

function refused(problem) {
  if (HARMLESS.includes(problem.code)) return;
  show(error, explain(problem));
  if (problem.event_id === REPLY) finish("");
}
