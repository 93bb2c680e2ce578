// The microphone as the Realtime API takes it.

import { openDevice } from "./camera.js";
import { wake } from "./player.js";

/** Resolves to close(). onAudio(base64): 16-bit samples at 24 kHz, fifty times a second. */
export async function openMicrophone(onAudio) {
  const stream = await openDevice({ audio: { echoCancellation: true } }, "microphone");
  const context = wake();
  await context.audioWorklet.addModule("page/worklet.js");
  const source = context.createMediaStreamSource(stream);
  const tap = new AudioWorkletNode(context, "pcm16", { channelCount: 1, channelCountMode: "explicit" });
  tap.port.onmessage = ({ data }) => onAudio(btoa(String.fromCharCode(...new Uint8Array(data.buffer))));
  source.connect(tap).connect(context.destination); // silent, but what leads nowhere may not run
  return () => {
    tap.port.onmessage = null;
    source.disconnect();
    tap.disconnect();
    for (const track of stream.getTracks()) track.stop();
  };
}
