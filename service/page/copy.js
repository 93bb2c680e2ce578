// Copying a text to the clipboard.

import { h } from "./dom.js";

const SHOWN = 1500; // ms that the button says how it went

/** A button that copies textOf(button). */
export function copyButton(textOf) {
  const button = h("button", { type: "button", class: "quiet copy", "aria-live": "polite" }, "Copy");
  button.onclick = async () => {
    const copied = await copy(textOf(button));
    button.textContent = copied ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), SHOWN);
  };
  return button;
}

/** Whether the text is on the clipboard now. Over plain http browsers have only the old way. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h("textarea", { class: "unseen", readonly: true, "aria-hidden": "true" });
    const focused = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return copied;
  }
}
