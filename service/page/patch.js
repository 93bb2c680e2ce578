// Makes shown elements equal to new ones by the fewest changes.

/** The element that then stands where `shown` stood: itself where it is of the same kind. Its buttons stay as they are. */
export function patched(shown, made) {
  if (shown.nodeType !== made.nodeType || shown.nodeName !== made.nodeName) {
    shown.replaceWith(made);
    return made;
  }
  if (shown.nodeType === Node.TEXT_NODE) setText(shown, made.data);
  else if (shown.nodeName !== "BUTTON") patchElement(shown, made);
  return shown;
}

/** Appending keeps a selection within the text, setting it anew does not. */
function setText(node, text) {
  if (text === node.data) return;
  if (text.startsWith(node.data)) node.appendData(text.slice(node.length));
  else node.data = text;
}

function patchElement(shown, made) {
  for (const { name } of [...shown.attributes]) if (!made.hasAttribute(name)) shown.removeAttribute(name);
  for (const { name, value } of made.attributes) if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  const before = [...shown.childNodes];
  const after = [...made.childNodes];
  after.forEach((node, index) => (index < before.length ? patched(before[index], node) : shown.append(node)));
  for (const node of before.slice(after.length)) node.remove();
}
