// Elements, made without HTML text: the page's policy allows none.

export const byId = (id) => document.getElementById(id);

/** h("button", { class: "quiet", onclick: stop }, "Stop"). A child may be a list of children; null and undefined are none. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

/** Shows a message in an element with role="alert"; an empty one hides it. */
export function show(element, message) {
  element.textContent = message;
  element.hidden = !message;
}

/** What a person is told of an exception; nothing where they stopped the work themselves. */
export function explain(error) {
  return error.name === "AbortError" ? "" : sentence(error.message || String(error));
}

/** The same, with the name that the page has for the request's field that is at fault; names: by the field. */
export function explainField(error, names) {
  const name = names[error.param];
  return name ? `${name}: ${error.message[0].toLowerCase()}${error.message.slice(1)}` : explain(error);
}

/** With a capital in front. */
export const capital = (words) => words[0].toUpperCase() + words.slice(1);

function sentence(words) {
  const begun = capital(words);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

/** Options from a list of { value, label, group }. The chosen value stays if it is still there. */
export function setOptions(select, options) {
  const before = select.value;
  const groups = new Map();
  select.replaceChildren();
  for (const { value, label, group } of options) {
    let parent = select;
    if (group) {
      if (!groups.has(group)) {
        groups.set(group, h("optgroup", { label: group }));
        select.append(groups.get(group));
      }
      parent = groups.get(group);
    }
    parent.append(h("option", { value }, label));
  }
  if (options.some(({ value }) => value === before)) select.value = before;
}
