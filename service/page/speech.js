// Speech from /v1/audio/speech: streamed as PCM to be heard at once, or as a file.

import { brokenOff, events, request } from "./api.js";
import { pcmDecoder } from "./pcm.js";

export const FORMATS = ["mp3", "wav", "flac", "opus", "aac", "pcm"];
const MOST_WHOLE = 4096; // characters: longer texts are only streamed, also into a file

/**
 * Streams speech. fields: of the API's request, with `input`. onAudio(samples, rate): Float32Array, in order.
 * Resolves to { steps, firstAudio, seconds, audio }: times since the request was sent and the length of the audio, in s.
 */
export async function speak({ fields, signal, onAudio }) {
  const sent = performance.now();
  const since = () => (performance.now() - sent) / 1000;
  const result = { steps: null, firstAudio: null, seconds: 0, audio: 0 };
  const json = { ...fields, response_format: "pcm", sample_rate: 48000, stream_format: "sse" };
  const response = await request("v1/audio/speech", { method: "POST", json, signal });
  const rate = Number(response.headers.get("x-sample-rate"));
  const decode = pcmDecoder();
  let complete = false;
  for await (const event of events(response, "speech")) {
    if (event.type === "speech.audio.done") {
      result.steps = event.steps ?? null;
      complete = true;
    } else if (event.type === "speech.audio.delta") {
      const samples = decode(event.audio);
      if (!samples.length) continue;
      result.firstAudio ??= since();
      result.seconds = since();
      result.audio += samples.length / rate;
      onAudio(samples, rate);
    }
  }
  if (!complete) throw brokenOff("speech");
  return result;
}

/** The speech as a file: { blob, name }. The same fields with the same seed sound the same. */
export async function file({ fields, format, signal }) {
  const json = { ...fields, response_format: format };
  if (fields.input.length <= MOST_WHOLE) json.stream = false;
  const response = await request("v1/audio/speech", { method: "POST", json, signal });
  try {
    return { blob: await response.blob(), name: `speech.${format}` };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw brokenOff("file");
  }
}
