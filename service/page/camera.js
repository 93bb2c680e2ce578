// A picture from the camera, in a dialog.

import { byId } from "./dom.js";

/** The camera or microphone of this device; an Error in plain words where there is none or it may not be used. */
export async function openDevice(constraints, name) {
  if (!navigator.mediaDevices) {
    throw new Error(`Browsers give a page the ${name} over https or on this machine (localhost) only.`);
  }
  try {
    return await navigator.mediaDevices.getUserMedia(constraints);
  } catch (error) {
    if (error.name === "NotAllowedError") throw new Error(`The browser was told not to give this page the ${name}.`);
    if (error.name === "NotFoundError") throw new Error(`No ${name} was found.`);
    throw new Error(`The ${name} cannot be used: ${error.message}`);
  }
}

/** A File, or null when the person cancels. */
export async function takePicture() {
  const stream = await openDevice({ video: { facingMode: "environment" } }, "camera");
  const dialog = byId("camera-dialog");
  const view = byId("camera-view");
  view.srcObject = stream;
  dialog.showModal();
  byId("camera-take").focus();
  const taken = await new Promise((resolve) => {
    byId("camera-take").onclick = async () => resolve(await still(view));
    byId("camera-cancel").onclick = () => resolve(null);
    dialog.onclose = () => resolve(null);
  });
  dialog.onclose = null;
  dialog.close();
  view.srcObject = null;
  for (const track of stream.getTracks()) track.stop();
  return taken;
}

async function still(view) {
  if (!view.videoWidth) await new Promise((resolve) => view.addEventListener("loadeddata", resolve, { once: true }));
  const canvas = document.createElement("canvas");
  canvas.width = view.videoWidth;
  canvas.height = view.videoHeight;
  canvas.getContext("2d").drawImage(view, 0, 0);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
  return new File([blob], "camera.jpg", { type: "image/jpeg" });
}
