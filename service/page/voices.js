// The voices that the server knows, and keeping another.

import { getJson, request } from "./api.js";
import { setOptions } from "./dom.js";

export const voices = { all: [] };

/** Fills every list of voices. */
export async function loadVoices() {
  voices.all = (await getJson("v1/audio/voices")).data;
  const options = voices.all.map(({ id, name, type }) => ({
    value: id,
    label: name,
    group: type === "builtin" ? "Built in" : "Kept here",
  }));
  for (const select of document.querySelectorAll("select.voices")) setOptions(select, options);
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
