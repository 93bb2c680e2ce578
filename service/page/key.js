// The API key: asked for when the server wants one, kept in this tab's session storage.

import { byId } from "./dom.js";

const STORED = "reprise-key";
let asking = null;

/** Opens the dialog unless the stored key has changed since `used` was sent. The key, or "" if the person gave none. */
export function askForKey(used) {
  const stored = sessionStorage.getItem(STORED) ?? "";
  if (stored && stored !== used) return Promise.resolve(stored);
  asking ??= open(Boolean(used)).finally(() => (asking = null));
  return asking;
}

/** The key to send: that of the tab. Requests wait while the dialog is open. */
export async function currentKey() {
  if (asking) await asking;
  return sessionStorage.getItem(STORED) ?? "";
}

function open(refused) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("key-problem").textContent = refused
    ? "The server does not know this key."
    : "This server asks for a key.";
  field.value = "";
  byId("key-cancel").onclick = () => dialog.close("");
  dialog.returnValue = "";
  dialog.querySelector("form").onsubmit = (event) => {
    event.preventDefault();
    dialog.close(field.value.trim());
  };
  dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        if (dialog.returnValue) sessionStorage.setItem(STORED, dialog.returnValue);
        else sessionStorage.removeItem(STORED);
        field.value = "";
        resolve(dialog.returnValue);
        dialog.returnValue = "";
      },
      { once: true },
    );
  });
}
