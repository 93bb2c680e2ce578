// A file as the person's paste or drop brings it.
const [kind, name, type, base64] = arguments;
const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], name, { type }));
const named = kind === "paste" ? { clipboardData: data } : { dataTransfer: data };
const make = kind === "paste" ? ClipboardEvent : DragEvent;
const events = kind === "paste" ? ["paste"] : ["dragover", "drop"];
for (const event of events) document.body.dispatchEvent(new make(event, { ...named, bubbles: true, cancelable: true }));
