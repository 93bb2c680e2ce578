// One streamed chat completion, spoken while it is written if wanted.

import { brokenOff, events, request } from "./api.js";
import { pcmDecoder } from "./pcm.js";

const RATE = 24_000; // Hz, of pcm16 in spoken answers

/**
 * Streams an answer into `written`, an Answer. temperature: null for the model's own. speech: { model, voice } of a spoken
 * answer, which goes to `sound`.
 * Resolves to { usage, steps, finish, firstToken, seconds, sound }, times in seconds since the request was sent;
 * sound: { first, audio, seconds, steps }: when it began, its length, the time from the first token until all was
 * there, and the steps of the speech model.
 */
export async function ask({ model, messages, temperature, speech, signal, written, sound }) {
  const { result, take } = receiver({ sent: performance.now(), written, sound });
  const json = { model, messages, temperature, stream: true, stream_options: { include_usage: true } };
  if (speech) Object.assign(json, { modalities: ["text", "audio"], audio: { ...speech, format: "pcm16" } });
  const response = await request("v1/chat/completions", { method: "POST", json, signal });
  for await (const chunk of events(response, "answer")) {
    for (const choice of chunk.choices) {
      take(choice.delta);
      result.finish = choice.finish_reason ?? result.finish;
    }
    result.usage = chunk.usage ?? result.usage;
    result.steps = chunk.steps ?? result.steps;
  }
  if (!result.usage) throw brokenOff("answer");
  return result;
}

/** take(delta) hands on what comes of an answer that was asked for at `sent`; result: ask's, but for usage, steps, finish. */
export function receiver({ sent, written, sound }) {
  const since = () => (performance.now() - sent) / 1000;
  const result = { usage: null, steps: null, finish: null, firstToken: null, seconds: 0, sound: null };
  const decode = pcmDecoder();
  let steps = null;

  function take({ content, audio, reasoning_content: thought }) {
    const text = content || audio?.transcript;
    if (text || thought) {
      result.firstToken ??= since();
      result.seconds = since();
    }
    if (text) written.addText(text);
    if (thought) written.addThought(thought);
    steps = audio?.steps ?? steps;
    const samples = audio?.data ? decode(audio.data) : [];
    if (samples.length) {
      result.sound ??= { first: since(), audio: 0, seconds: 0, steps };
      result.sound.audio += samples.length / RATE;
      result.sound.seconds = since() - result.firstToken;
      sound.push(samples, RATE);
    }
    if (result.sound) result.sound.steps = steps;
  }

  return { result, take };
}
