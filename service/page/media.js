// Pictures and videos that go with the next question.

import { byId, explain, h } from "./dom.js";

/** An attachment: { kind: "image" | "video", name, preview (blob: URL), url (data: URL) }. */
export class Attachments {
  /** list: the element that shows them. onError(message). */
  constructor(list, onError) {
    this.list = list;
    this.onError = onError;
    this.items = [];
    this.kept = []; // of the conversation: their previews are still shown
    this.ready = Promise.resolve(); // when all that was added has been read
  }

  add(files) {
    this.onError("");
    this.ready = this.ready.then(() => this.#read(files)).catch((problem) => this.onError(explain(problem)));
    return this.ready;
  }

  async #read(files) {
    for (const file of files) {
      const kind = file.type.split("/")[0];
      if (kind !== "image" && kind !== "video") {
        this.onError(`${file.name || "This"} is neither a picture nor a video.`);
        continue;
      }
      const item = { kind, name: file.name || kind, preview: URL.createObjectURL(file), url: await dataUrl(file) };
      this.putBack([item]);
    }
  }

  putBack(items) {
    this.kept = this.kept.filter((item) => !items.includes(item));
    this.items.push(...items);
    this.list.append(...items.map((item) => this.#row(item)));
  }

  /** What is asked about stays in the conversation, unless it is put back. */
  keep(items) {
    this.kept.push(...items);
  }

  /** Ends the conversation. */
  forget() {
    for (const { preview } of this.kept) URL.revokeObjectURL(preview);
    this.kept = [];
  }

  /** The attachments, which the list then no longer holds. */
  take() {
    const items = this.items;
    this.items = [];
    this.list.replaceChildren();
    return items;
  }

  #row(item) {
    const row = h("li", {}, thumbnail(item));
    const remove = () => {
      this.items = this.items.filter((other) => other !== item);
      URL.revokeObjectURL(item.preview);
      row.remove();
      byId("question").focus();
    };
    row.append(h("button", { type: "button", class: "remove", "aria-label": `Remove ${item.name}`, onclick: remove }, "×"));
    return row;
  }
}

export function thumbnail(item) {
  return item.kind === "image"
    ? h("img", { src: item.preview, alt: item.name })
    : h("video", { src: item.preview, controls: true, muted: true, playsinline: true, "aria-label": item.name });
}

/** The part of a message, in the API's form. */
export function part({ kind, url }) {
  return kind === "image" ? { type: "image_url", image_url: { url } } : { type: "video_url", video_url: { url } };
}

/**
 * Makes pasting and dropping anywhere on the page add files. active(): whether this view is shown; in another one a
 * browser would leave the page for a file that is dropped beside a field.
 */
export function catchFiles(attachments, active) {
  const zone = byId("dropzone");
  const carriesFiles = ({ dataTransfer, target }) => dataTransfer?.types.includes("Files") && target.type !== "file";
  addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!active() || !files.length) return;
    event.preventDefault();
    attachments.add(files);
  });
  addEventListener("dragover", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    if (active()) zone.hidden = false;
    else event.dataTransfer.dropEffect = "none";
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) zone.hidden = true;
  });
  addEventListener("drop", (event) => {
    zone.hidden = true;
    if (!carriesFiles(event)) return;
    event.preventDefault();
    if (active()) attachments.add([...event.dataTransfer.files]);
  });
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}
