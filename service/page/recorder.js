// A clip from the microphone.

import { openDevice } from "./camera.js";

/**
 * Begins to record. Resolves to stop(), which resolves to a File. onSeconds(seconds so far): four times a second.
 * Echo cancellation and the like are off: they change a voice.
 */
export async function record(onSeconds) {
  const audio = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
  const stream = await openDevice({ audio }, "microphone");
  const recorder = new MediaRecorder(stream);
  const chunks = [];
  recorder.ondataavailable = ({ data }) => chunks.push(data);
  const began = performance.now();
  const timer = setInterval(() => onSeconds((performance.now() - began) / 1000), 250);
  recorder.start();
  return () =>
    new Promise((resolve) => {
      recorder.onstop = () => {
        clearInterval(timer);
        for (const track of stream.getTracks()) track.stop();
        const type = recorder.mimeType.split(";")[0];
        resolve(new File(chunks, `recording.${type.split("/")[1]}`, { type }));
      };
      recorder.stop();
    });
}
