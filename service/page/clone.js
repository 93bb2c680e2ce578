// Keeping a voice: from a clip of a file or the microphone, with its speaker's consent, or from a description.

import { byId, explain, explainField, show } from "./dom.js";
import { hosted } from "./models.js";
import { record } from "./recorder.js";
import { keepVoice } from "./voices.js";

const error = byId("clone-error");
const NAMES = {
  audio_sample: "Clip",
  name: "Name",
  ref_text: "What the clip says",
  speaker_description: "What it is like",
  seed: "Seed",
};
let clip = null; // File
let stopRecording = null;

/** onKept(voice): after a voice was kept and the lists hold it. */
export function startClone(onKept) {
  byId("record").onclick = toggleRecording;
  byId("clone").addEventListener("toggle", ({ target }) => target.open || endRecording());
  addEventListener("hashchange", endRecording);
  byId("clip").onchange = ({ target }) => target.files[0] && choose(target.files[0]);
  keeps("clone", clonedFields, (voice) => {
    byId("clip-sound").hidden = true;
    clip = null;
    onKept(voice);
  });
  keeps("design", designedFields, onKept);
}

/** Makes the form of the section `id` keep the voice that fields() describes. */
function keeps(id, fields, onKept) {
  const form = byId(`${id}-form`);
  const [button, state, problem] = [".keep", ".keeping", ".error"].map((part) => form.querySelector(part));
  byId(id).addEventListener("toggle", () => show(problem, ""));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    show(problem, "");
    button.disabled = true;
    try {
      const described = fields();
      state.textContent = "Making the voice";
      const voice = await keepVoice({ ...described, model: hosted.speech.id });
      form.reset();
      byId(id).open = false;
      onKept(voice);
    } catch (failure) {
      show(problem, explainField(failure, NAMES));
    } finally {
      button.disabled = false;
      state.textContent = "";
    }
  });
}

async function toggleRecording() {
  const button = byId("record");
  const state = byId("record-state");
  show(error, "");
  try {
    if (stopRecording) {
      const stop = stopRecording;
      stopRecording = null;
      choose(await stop());
      byId("clip").value = "";
      state.textContent = "";
    } else {
      stopRecording = await record((seconds) => (state.textContent = `${seconds.toFixed(0)} s`));
      state.textContent = "Recording";
    }
  } catch (problem) {
    show(error, explain(problem));
  }
  button.textContent = stopRecording ? "Stop recording" : "Record";
  button.setAttribute("aria-pressed", String(Boolean(stopRecording)));
}

/** The microphone is not left on where it is no longer seen. */
function endRecording() {
  if (stopRecording) toggleRecording();
}

function choose(file) {
  clip = file;
  const sound = byId("clip-sound");
  URL.revokeObjectURL(sound.src);
  sound.src = URL.createObjectURL(file);
  sound.hidden = false;
}

function clonedFields() {
  const box = byId("consent");
  if (!clip) throw new Error("Record a clip or choose a file first.");
  const name = nameIn("clone-name");
  if (!box.checked) throw new Error("A voice is kept only with the speaker's consent.");
  const consent = box.parentElement.textContent.trim();
  return { audio_sample: clip, name, consent, ref_text: byId("clone-words").value.trim() };
}

function designedFields() {
  const description = byId("design-words").value.trim();
  if (!description) throw new Error("Say what the voice is like.");
  return { speaker_description: description, name: nameIn("design-name"), seed: byId("design-seed").value };
}

function nameIn(id) {
  const name = byId(id).value.trim();
  if (!name) throw new Error("Give the voice a name.");
  return name;
}
