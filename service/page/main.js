// The page: which view is shown, and whether the server is ready.

import { getJson, LIMIT, stateOf, UNREACHABLE } from "./api.js";
import { byId, capital, explain, show } from "./dom.js";
import { hosted, loadModels } from "./models.js";
import { startSee } from "./see.js";
import { aboutVoice, startSpeak } from "./speak.js";
import { loadVoices } from "./voices.js";
import { watch } from "./watch.js";

const VIEWS = ["see", "speak", "watch"];
const RETRY = 2000; // ms
const CHECK = 15000;
let known = false; // whether the server was ready when it was asked last
let timer = null;

const current = () => (VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "see");

function showView() {
  const view = current();
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} – Reprise`;
  watch(view === "watch");
}

function openView() {
  showView();
  byId(`${current()}-title`).focus();
}

/** Reads what is hosted whenever the server has become ready; says in the head of the page how it is. */
async function connect() {
  let keyless = false; // the person has given no key: they are asked again when they want to be
  try {
    const ready = await getJson("ready", { limit: LIMIT, accept: (code) => code === 503 });
    const good = ready.status === "ready";
    answers();
    tell(good ? "Ready" : capital(stateOf(ready)), good);
    if (good && !known) {
      await loadModels();
      if (hosted.speech) await loadVoices();
      aboutVoice();
    }
    known = good;
  } catch (problem) {
    tell(explain(problem), false);
    known = false;
    keyless = problem.status === 401;
  }
  byId("key-again").hidden = !keyless;
  clearTimeout(timer);
  if (!keyless) timer = setTimeout(connect, known ? CHECK : RETRY);
}

/** The server answers: what views still say of it is no longer true. */
function answers() {
  for (const error of document.querySelectorAll(".error")) if (error.textContent === UNREACHABLE) show(error, "");
}

/** A request has found the server in trouble: what the head of the page says of it may no longer be true. */
function connectAgain() {
  if (!known) return;
  clearTimeout(timer);
  timer = setTimeout(connect);
}

/** Says it again only where it has changed: screen readers read it out. */
function tell(words, good) {
  const state = byId("state");
  if (state.textContent !== words) state.textContent = words;
  state.dataset.good = good;
}

addEventListener("hashchange", openView);
addEventListener("trouble", connectAgain);
byId("key-again").onclick = connect;
document.querySelector(".skip").onclick = (event) => {
  event.preventDefault(); // an address that names no view would open the first
  byId(`${current()}-title`).focus();
};
startSee(() => current() === "see");
startSpeak();
showView();
connect();
