// One answer: its words while they come, how it was made, and what can be done with it.

import { copyButton } from "./copy.js";
import { h } from "./dom.js";
import { aloudFacts } from "./facts.js";
import { Markdown } from "./markdown.js";
import { Sound } from "./sound.js";

export class Answer {
  /** speech(): { model, voice } that reads it, null where nothing speaks. onError(problem): of what is asked for later. */
  constructor({ speech, onError }) {
    this.text = "";
    this.speech = speech;
    this.onError = onError;
    const thought = h("p", { dir: "auto" });
    this.thoughts = h("details", { class: "thoughts", hidden: true }, h("summary", {}, "Thoughts"), thought);
    this.words = h("div", { class: "words" });
    const named = { tabindex: 0, "aria-label": "The answer as plain text" };
    this.raw = h("pre", { class: "raw", dir: "auto", hidden: true, ...named });
    this.facts = h("p", { class: "facts", "aria-live": "off" });
    this.aloud = h("span", { class: "aloud" });
    this.actions = h("div", { class: "actions", "aria-live": "off" });
    this.element = h("li", { class: "answer", "aria-busy": "true" }, this.thoughts, this.words, this.raw, this.facts, this.actions);
    this.markdown = new Markdown(this.words);
    this.scheduled = null;
  }

  /** Shows more of the text with the next picture that the browser draws. */
  addText(added) {
    this.text += added;
    this.scheduled ??= requestAnimationFrame(() => this.#draw(true));
  }

  addThought(added) {
    this.thoughts.hidden = false;
    this.thoughts.lastChild.append(added);
  }

  /** A sound that is heard while the answer is written. onSilence(): it has ended, or was stopped. */
  beginSound(onSilence = () => {}) {
    this.sound = new Sound(() => {
      this.#silent();
      onSilence();
    });
    return this.sound;
  }

  /** No more text comes. facts: the line below. */
  end(facts) {
    const follow = atEnd();
    this.#draw(false);
    this.facts.append(facts, this.aloud);
    this.element.removeAttribute("aria-busy");
    if (this.text) this.#addActions();
    if (follow) toEnd();
  }

  #addActions() {
    if (this.speech()) {
      this.hear = h("button", { type: "button", class: "quiet hear", onclick: () => this.#toggleSound() });
      this.actions.append(this.hear);
      this.#nameHear();
    }
    const source = h("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Plain text");
    source.onclick = () => this.#toggleRaw(source);
    this.actions.append(copyButton(() => this.text), source);
  }

  /** Says below the answer how its sound came. */
  sounded(sound) {
    this.aloud.textContent = aloudFacts(sound);
  }

  #draw(open) {
    cancelAnimationFrame(this.scheduled);
    this.scheduled = null;
    const follow = atEnd();
    this.markdown.show(this.text, open);
    if (follow) toEnd();
  }

  #silent() {
    this.sound = null;
    this.#nameHear();
  }

  #nameHear() {
    if (this.hear) this.hear.textContent = this.sound ? "Stop" : "Hear it";
  }

  async #toggleSound() {
    if (this.sound) return this.sound.stop();
    const sound = this.beginSound();
    this.#nameHear();
    try {
      const { firstAudio, audio, seconds, steps } = await sound.read({ ...this.speech(), input: this.text });
      this.sounded({ first: firstAudio, audio, seconds, steps, gaps: sound.gaps });
    } catch (problem) {
      this.onError(problem);
    }
  }

  #toggleRaw(button) {
    const raw = this.raw.hidden;
    this.raw.textContent = this.text;
    this.raw.hidden = !raw;
    this.words.hidden = raw;
    button.setAttribute("aria-pressed", String(raw));
  }
}

/** Whether the end of the conversation is in view; then it stays there. */
export function atEnd() {
  const { scrollHeight, clientHeight, scrollTop } = document.documentElement;
  return scrollHeight - clientHeight - scrollTop < 60;
}

export function toEnd() {
  scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
}
