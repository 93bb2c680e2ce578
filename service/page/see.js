// The view that sees: a conversation about pictures and videos.

import { Answer, toEnd } from "./answer.js";
import { takePicture } from "./camera.js";
import { ask } from "./chat.js";
import { byId, explain, h, show } from "./dom.js";
import { chatFacts } from "./facts.js";
import { Attachments, catchFiles, part, thumbnail } from "./media.js";
import { hosted, several } from "./models.js";
import { wake } from "./player.js";
import { drawSample } from "./sample.js";
import { hush } from "./sound.js";
import { endTalk, startTalk } from "./talk.js";

let messages = []; // of the conversation, in the API's form
const error = byId("see-error");
const question = byId("question");
const attachments = new Attachments(byId("attached"), (message) => show(error, message));
let running = null; // with abort(), the answer that is being written
let sending = false; // until it is answered, from when the person asks: attachments may have to be read first

export function startSee(active) {
  catchFiles(attachments, active);
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  question.addEventListener("input", fit);
  byId("choose").onclick = () => byId("files").click();
  byId("files").onchange = async ({ target }) => {
    await attachments.add([...target.files]);
    target.value = "";
    question.focus();
  };
  byId("camera").onclick = async () => {
    try {
      const picture = await takePicture();
      if (picture) await attachments.add([picture]);
    } catch (problem) {
      show(error, explain(problem));
    }
    question.focus();
  };
  byId("sample").onclick = async ({ currentTarget: button }) => {
    button.disabled = true;
    await attachments.add([await drawSample()]);
    question.value = "What is in this picture?";
    await send();
    button.disabled = false;
  };
  byId("aloud").onchange = ({ target }) => {
    byId("answer-talker").hidden = !target.checked;
    if (target.checked) wake();
    else hush();
  };
  startTalk({ messages: () => messages, addQuestion, beginAnswer, speech, stop, busy, begun });
  byId("stop-answer").onclick = stop;
  byId("forget").onclick = forget;
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && active() && !document.querySelector("dialog[open]")) stop();
  });
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function stop() {
  running?.abort();
  hush();
}

function forget() {
  stop();
  endTalk();
  messages = [];
  attachments.forget();
  byId("turns").replaceChildren();
  begun();
  show(error, "");
  question.focus();
}

async function send() {
  if (sending || running) return;
  sending = true;
  await attachments.ready;
  await sendQuestion();
  sending = false;
}

async function sendQuestion() {
  const text = question.value.trim();
  if (!text && !attachments.items.length) return;
  if (!hosted.chat) {
    show(error, "There is no model to ask, or the server is not ready yet.");
    return;
  }
  question.value = "";
  fit();
  const { asked, media } = addQuestion(text);
  const conversation = messages;
  const answered = await answer(media);
  if (answered || conversation !== messages) return;
  messages.pop(); // what was not answered can be asked again
  asked.remove();
  attachments.putBack(media);
  question.value ||= text;
  fit();
  begun();
}

/** Adds a question, with what is attached. asked: its element. */
function addQuestion(text) {
  show(error, "");
  const media = attachments.take();
  const asked = h("li", { class: "asked" });
  if (media.length) asked.append(h("div", { class: "shown" }, ...media.map(thumbnail)));
  if (text) asked.append(h("p", { dir: "auto" }, text));
  const message = { role: "user", content: [...media.map(part), ...(text ? [{ type: "text", text }] : [])] };
  messages.push(message);
  byId("turns").append(asked);
  attachments.keep(media);
  begun();
  return { asked, media, message };
}

/** An empty answer, and its sound if it is to be heard. onSilence(): the sound has ended, or was stopped. */
function beginAnswer(onSilence) {
  const written = new Answer({ speech, onError: (problem) => show(error, explain(problem)) });
  byId("turns").append(written.element);
  toEnd();
  hush();
  const sound = byId("aloud").checked && speech() ? written.beginSound(onSilence) : null;
  return { written, sound };
}

/** Shows the welcome or what a conversation has. */
function begun() {
  byId("welcome").hidden = byId("turns").childElementCount > 0;
  byId("forget").hidden = !byId("welcome").hidden;
}

/** Asks for the answer to the conversation so far; whether there was one, if only a part. media: of its last question. */
async function answer(media) {
  const model = hosted.chat;
  const conversation = messages;
  const { written, sound } = beginAnswer();
  busy(new AbortController());
  question.focus({ preventScroll: true });
  let facts = "";
  try {
    const result = await ask({
      model: model.id,
      messages: instructed(messages),
      temperature: byId("temperature").valueAsNumber, // JSON has null for none
      speech: sound && speech(),
      signal: running.signal,
      written,
      sound,
    });
    facts = [several("chat") && model.id, chatFacts(result, countMedia())].filter(Boolean).join(" · ");
    sound?.finish();
    if (result.sound) written.sounded({ ...result.sound, gaps: sound.gaps });
  } catch (problem) {
    sound?.stop();
    show(error, explainMedia(problem, media));
    facts = problem.name === "AbortError" ? "stopped" : "broken off";
  }
  written.end(facts);
  busy(null);
  question.focus({ preventScroll: true });
  if (!written.text) {
    written.element.remove();
    return false;
  }
  conversation.push({ role: "assistant", content: written.text });
  return true;
}

/** The messages behind the system prompt, if there is one. */
function instructed(conversation) {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }, ...conversation] : conversation;
}

/** What went wrong, with the name of the picture or video that the server names by its place in the last question. */
function explainMedia(problem, media) {
  const place = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(problem.param ?? "");
  const item = place && Number(place[1]) === instructed(messages).length - 1 ? media[Number(place[2])] : null;
  return item ? `${item.name}: ${explain(problem)}` : explain(problem);
}

/** What speaks, and with which voice. */
function speech() {
  return hosted.speech && { model: hosted.speech.id, voice: byId("answer-voice").value };
}

function countMedia() {
  return messages.flatMap(({ content }) => (Array.isArray(content) ? content : [])).filter(({ type }) => type !== "text").length;
}

/** An answer is being made, which answer.abort() ends; null: none is. */
function busy(answer) {
  running = answer;
  byId("ask").hidden = Boolean(answer);
  byId("stop-answer").hidden = !answer;
}
