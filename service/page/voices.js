// The voices that the server knows, and keeping another.

import { getJson, request } from "./api.js";
import { setOptions } from "./dom.js";
import { several } from "./models.js";

export const voices = { all: [] };

const GROUPS = { builtin: "Built in", lora: "Adapters", uploaded: "Kept here" };

/** Fills every list of voices. */
export async function loadVoices() {
  voices.all = (await getJson("v1/audio/voices")).data;
  const options = voices.all.map(({ id, name, type, model }) => ({
    value: id,
    label: type === "builtin" ? name : marked(name, model),
    group: GROUPS[type],
  }));
  for (const select of document.querySelectorAll("select.voices")) setOptions(select, options);
}

/** With the speech model that a voice was kept with, where that is not plain. */
function marked(name, model) {
  if (!model) return `${name} (model not served)`;
  return several("speech") ? `${name} (${model})` : name;
}

/** Keeps a voice; fields of the API's form, empty ones are left out. The voice, which the lists then have. */
export async function keepVoice(fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) if (value) form.append(name, value);
  const voice = await (await request("v1/audio/voices", { method: "POST", form })).json();
  await loadVoices();
  return voice;
}

export async function deleteVoice(id) {
  await request(`v1/audio/voices/${encodeURIComponent(id)}`, { method: "DELETE" });
  await loadVoices();
}
