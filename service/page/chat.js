// One streamed chat completion, spoken while it is written if wanted.

import { brokenOff, events, request } from "./api.js";
import { pcmDecoder } from "./pcm.js";

const RATE = 24_000; // Hz, of pcm16 in spoken answers

/** Takes an answer while it comes, and measures it: `result` is that of `ask` but for usage, steps and finish. sent: when it was asked for. */
export class Incoming {
  constructor({ sent, onText, onThought, onAudio }) {
    Object.assign(this, { sent, onText, onThought, onAudio });
    this.result = { usage: null, steps: null, finish: null, firstToken: null, seconds: 0, sound: null };
    this.decode = pcmDecoder();
  }

  addText(text) {
    this.#token();
    this.onText(text);
  }

  addThought(thought) {
    this.#token();
    this.onThought(thought);
  }

  /** base64: of 16-bit samples. */
  addAudio(base64) {
    const samples = this.decode(base64);
    if (!samples.length) return;
    const { result } = this;
    result.sound ??= { first: this.#since(), audio: 0, seconds: 0, steps: null };
    result.sound.audio += samples.length / RATE;
    result.sound.seconds = this.#since() - result.firstToken;
    this.onAudio(samples, RATE);
  }

  #since() {
    return (performance.now() - this.sent) / 1000;
  }

  #token() {
    this.result.firstToken ??= this.#since();
    this.result.seconds = this.#since();
  }
}

/**
 * Streams an answer. temperature: null for the model's own. onText(text), onThought(text): what is added. speech: { model, voice } of a spoken answer, whose
 * sound goes to onAudio(samples, rate): Float32Array, in order.
 * Resolves to { usage, steps, finish, firstToken, seconds, sound }, times in seconds since the request was sent;
 * sound: { first, audio, seconds, steps }: when it began, its length, the time from the first token until all was
 * there, and the steps of the speech model.
 */
export async function ask({ model, messages, temperature, speech, signal, onText, onThought, onAudio }) {
  const incoming = new Incoming({ sent: performance.now(), onText, onThought, onAudio });
  const { result } = incoming;
  const json = { model, messages, temperature, stream: true, stream_options: { include_usage: true } };
  if (speech) Object.assign(json, { modalities: ["text", "audio"], audio: { ...speech, format: "pcm16" } });
  const response = await request("v1/chat/completions", { method: "POST", json, signal });
  let spokenSteps = null;

  for await (const chunk of events(response, "answer")) {
    for (const choice of chunk.choices) {
      const { content, audio, reasoning_content: thought } = choice.delta;
      const text = content || audio?.transcript;
      if (text) incoming.addText(text);
      if (thought) incoming.addThought(thought);
      if (audio?.data) incoming.addAudio(audio.data);
      spokenSteps = audio?.steps ?? spokenSteps;
      result.finish = choice.finish_reason ?? result.finish;
    }
    result.usage = chunk.usage ?? result.usage;
    result.steps = chunk.steps ?? result.steps;
  }
  if (result.sound) result.sound.steps = spokenSteps;
  if (!result.usage) throw brokenOff("answer");
  return result;
}
