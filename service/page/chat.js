// One streamed chat completion, spoken while it is written if wanted.

import { brokenOff, events, request } from "./api.js";
import { pcmDecoder } from "./pcm.js";

const RATE = 24_000; // Hz, of pcm16 in spoken answers

/**
 * Streams an answer. temperature: null for the model's own. onText(text), onThought(text): what is added. speech: { model, voice } of a spoken answer, whose
 * sound goes to onAudio(samples, rate): Float32Array, in order.
 * Resolves to { usage, steps, finish, firstToken, seconds, sound }, times in seconds since the request was sent;
 * sound: { first, audio, seconds, steps }: when it began, its length, the time from the first token until all was
 * there, and the steps of the speech model.
 */
export async function ask({ model, messages, temperature, speech, signal, onText, onThought, onAudio }) {
  const sent = performance.now();
  const since = () => (performance.now() - sent) / 1000;
  const result = { usage: null, steps: null, finish: null, firstToken: null, seconds: 0, sound: null };
  const json = { model, messages, temperature, stream: true, stream_options: { include_usage: true } };
  if (speech) Object.assign(json, { modalities: ["text", "audio"], audio: { ...speech, format: "pcm16" } });
  const response = await request("v1/chat/completions", { method: "POST", json, signal });
  const decode = pcmDecoder();
  let spokenSteps = null;

  function take({ content, audio, reasoning_content: thought }) {
    const text = content || audio?.transcript;
    if (text || thought) {
      result.firstToken ??= since();
      result.seconds = since();
    }
    if (text) onText(text);
    if (thought) onThought(thought);
    spokenSteps = audio?.steps ?? spokenSteps;
    const samples = audio?.data ? decode(audio.data) : [];
    if (!samples.length) return;
    result.sound ??= { first: since(), audio: 0, seconds: 0, steps: null };
    result.sound.audio += samples.length / RATE;
    result.sound.seconds = since() - result.firstToken;
    onAudio(samples, RATE);
  }

  for await (const chunk of events(response, "answer")) {
    for (const choice of chunk.choices) {
      take(choice.delta);
      result.finish = choice.finish_reason ?? result.finish;
    }
    result.usage = chunk.usage ?? result.usage;
    result.steps = chunk.steps ?? result.steps;
  }
  if (result.sound) result.sound.steps = spokenSteps;
  if (!result.usage) throw brokenOff("answer");
  return result;
}
