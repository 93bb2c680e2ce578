// What the server hosts, and which of its models are used here.

import { getJson } from "./api.js";
import { byId, setOptions } from "./dom.js";

const KINDS = ["chat", "speech", "transcription"];

/** all: every model, once, under its first name. chat, speech, transcription: the one in use, null where none is hosted. */
export const hosted = { chat: null, speech: null, transcription: null, all: [] };

/** Fills `hosted` and the lists that choose a model. */
export async function loadModels() {
  const { data } = await getJson("v1/models");
  hosted.all = data.filter(({ root }, at) => data.findIndex((other) => other.root === root) === at); // without aliases
  for (const kind of KINDS) {
    const options = ofKind(kind).map(({ id }) => ({ value: id, label: id }));
    for (const select of pickers(kind)) {
      setOptions(select, options);
      select.closest(".picker").hidden = !several(kind);
      select.onchange = () => choose(kind, select.value);
    }
    choose(kind, sessionStorage.getItem(stored(kind)));
  }
  byId("ask").disabled = byId("sample").disabled = !hosted.chat;
  byId("say").disabled = !hosted.speech;
  byId("aloud-label").hidden = !hosted.speech;
  byId("talk").hidden = !hosted.transcription;
}

/** Whether there is a choice. */
export const several = (kind) => ofKind(kind).length > 1;

const ofKind = (kind) => hosted.all.filter((model) => model.kind === kind);
const pickers = (kind) => document.querySelectorAll(`select.${kind}-models`);
const stored = (kind) => `reprise-${kind}-model`;

/** Uses the model of this name, else the first; the tab remembers it. */
function choose(kind, id) {
  const models = ofKind(kind);
  const model = models.find((one) => one.id === id) ?? models[0] ?? null;
  hosted[kind] = model;
  if (model && id) sessionStorage.setItem(stored(kind), model.id);
  for (const select of pickers(kind)) select.value = model?.id ?? "";
  if (kind === "transcription") return;
  const none = kind === "chat" ? "No model that sees is hosted here." : "No model that speaks is hosted here.";
  byId(kind === "chat" ? "see-model" : "speak-model").textContent = about(kind, model) ?? none;
}

/** A name that a picker shows beside it is not said twice. */
function about(kind, model) {
  if (!model) return null;
  const named = kind === "chat" && several(kind);
  return [named ? "" : model.id, model.notice].filter(Boolean).join(" – ");
}
