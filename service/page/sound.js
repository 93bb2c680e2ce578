// The sound of an answer: spoken while it is written, or read again from its text.

import { Player } from "./player.js";
import { speak } from "./speech.js";

let current = null; // Sound that is heard: one at a time

export class Sound {
  /** onEnd(): when it has been heard to its end, or was stopped. */
  constructor(onEnd) {
    hush();
    current = this;
    this.controller = new AbortController();
    this.player = new Player({
      onEnd: () => {
        if (current === this) current = null;
        onEnd();
      },
    });
  }

  push(samples, rate) {
    this.player.push(samples, rate);
  }

  /** Nothing follows. */
  finish() {
    this.player.finish();
  }

  stop() {
    this.controller.abort();
    this.player.stop();
  }

  get gaps() {
    return this.player.gaps;
  }

  /** Reads a text. fields: of the speech API's request, with `input`. Resolves to speak()'s result when all has come. */
  async read(fields) {
    try {
      const result = await speak({ fields, signal: this.controller.signal, onAudio: (...audio) => this.push(...audio) });
      this.finish();
      return result;
    } catch (error) {
      this.stop();
      throw error;
    }
  }
}

/** Ends what is heard now. */
export function hush() {
  current?.stop();
}
