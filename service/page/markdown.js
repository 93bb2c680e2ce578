// Answers in Markdown, as elements. Built from nodes alone: no text of an answer is ever read as HTML.

import { copyButton } from "./copy.js";
import { h } from "./dom.js";
import { inline } from "./inline.js";
import { patched } from "./patch.js";

const DEEPEST = 8; // quotes and lists inside each other; what is deeper is text
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])( {1,4}|$)/;
const UNFINISHED = /^(?:[-*_+`~#|=:>\s]*|[\s>]*\d{1,9}[.)]?)$/;

/** What an element shows of a text that grows. Elements that stay the same stay in place, and so does a selection. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.shown = []; // { source, node } of each block
  }

  /** Shows the text. open: it is still being written. */
  show(text, open = false) {
    const lines = text.split(/\r\n?|\n/).map((line) => line.replaceAll("\t", "    "));
    // A line that has only begun may turn out to be a mark: it is shown when it says what it is.
    if (open && UNFINISHED.test(lines.at(-1).slice(0, 200))) lines.pop();
    const made = blocks(lines, 0, open);
    made.forEach((block, index) => this.#place(block, index, open && index === made.length - 1));
    for (const { node } of this.shown.splice(made.length)) node.remove();
  }

  #place(block, index, open) {
    const source = [block.kind, open, ...block.lines].join("\n");
    const before = this.shown[index];
    if (before?.source === source) return;
    const node = BUILD[block.kind](block, 0, open);
    if (before) before.node = patched(before.node, node);
    else this.element.append(node);
    this.shown[index] = { source, node: before?.node ?? node };
  }
}

/** Blocks of the lines: { kind, lines, ... }. open: the last line may be continued. */
function blocks(lines, depth, open) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? table(lines, at, open) ??
      (depth < DEEPEST ? quote(lines, at) ?? list(lines, at) : null) ?? paragraph(lines, at, depth);
    block.lines = lines.slice(at, block.end);
    found.push(block);
    at = block.end;
  }
  return found;
}

function fence(lines, at) {
  const opened = FENCE.exec(lines[at]);
  if (!opened) return null;
  const [, mark, info] = opened;
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end += 1;
  const indent = lines[at].length - lines[at].trimStart().length;
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, leading(line))));
  return { kind: "fence", end: Math.min(end + 1, lines.length), code: code.join("\n"), language: info.trim() };
}

function closes(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && leading(line) < 4 && text === mark[0].repeat(text.length);
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const text = lines[at].slice(found[0].length).trim();
  const words = text.split(" ");
  if (/^#+$/.test(words.at(-1))) words.pop();
  return { kind: "heading", end: at + 1, level: found[1].length, text: words.join(" ").trim() };
}

function rule(lines, at) {
  const bare = lines[at].replaceAll(" ", "");
  return /^(?:-{3,}|\*{3,}|_{3,})$/.test(bare) ? { kind: "rule", end: at + 1 } : null;
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  return { kind: "quote", end, inner: lines.slice(at, end).map((line) => line.replace(QUOTE, "")) };
}

/** { kind, end, ordered, start, items }: items of one list, each as its lines without their indent. */
function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const items = [];
  let end = at;
  while (end < lines.length && sibling(lines[end], first) && !rule(lines, end)) {
    const [mark, indent] = ITEM.exec(lines[end]);
    const begin = end;
    end = itemEnd(lines, end + 1, indent.length);
    items.push([lines[begin].slice(mark.length), ...dedented(lines.slice(begin + 1, end), mark.length)]);
    const next = written(lines, end);
    if (next < lines.length && sibling(lines[next], first)) end = next;
  }
  return items.length ? { kind: "list", end, ordered: Boolean(first[3]), start: Number(first[3] ?? 1), items } : null;
}

/** Whether the line begins an item of the list whose first mark is that of `first`. */
function sibling(line, first) {
  const found = ITEM.exec(line);
  return Boolean(found) && kindOf(found) === kindOf(first) && Math.abs(found[1].length - first[1].length) < 2;
}

/** Where the lines of an item end whose mark is indented by `indent`: deeper ones, and those that go on with its text. */
function itemEnd(lines, at, indent) {
  let end = at;
  for (let next = at; next < lines.length; next++) {
    const line = lines[next];
    if (!line.trim()) continue;
    const lazy = next === end && lines[next - 1].trim() && !ITEM.test(line) && !begins(lines, next);
    if (leading(line) < indent + 2 && !lazy) break;
    end = next + 1;
  }
  return end;
}

function dedented(lines, most) {
  const indent = lines.reduce((least, line) => (leading(line) && line.trim() ? Math.min(least, leading(line)) : least), most);
  return lines.map((line) => line.slice(Math.min(indent, leading(line))));
}

/** The first line from `at` on that is not blank. */
function written(lines, at) {
  let next = at;
  while (next < lines.length && !lines[next].trim()) next += 1;
  return next;
}

const kindOf = ([, , mark, number]) => (number ? mark.at(-1) : mark);
const leading = (line) => line.length - line.trimStart().length;

/** { kind, end, rows, sides }: cells by row, the first is the head; sides: how each column is aligned. */
function table(lines, at, open) {
  if (!lines[at].includes("|")) return null;
  const head = cells(lines[at]);
  if (at === lines.length - 1) {
    const begun = open && lines[at].trimStart().startsWith("|"); // the marks below it are on their way
    return begun ? { kind: "table", end: at + 1, rows: [head], sides: [] } : null;
  }
  const marks = cells(lines[at + 1]);
  if (marks.length !== head.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  const rows = [head];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end++) rows.push(cells(lines[end]));
  const sides = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null));
  return { kind: "table", end, rows, sides };
}

function cells(line) {
  const text = line.trim();
  const found = [""];
  for (let at = text[0] === "|" ? 1 : 0; at < text.length; at++) {
    if (text[at] === "|") found.push("");
    else if (text.startsWith("\\|", at)) found[found.length - 1] += text[++at];
    else found[found.length - 1] += text[at];
  }
  if (text.endsWith("|") && found.length > 1 && !found.at(-1)) found.pop();
  return found.map((cell) => cell.trim());
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && (depth >= DEEPEST || !begins(lines, end))) end += 1;
  return { kind: "paragraph", end, text: lines.slice(at, end).map((line) => line.trim()).join("\n") };
}

/** Whether a line interrupts the paragraph before it. */
function begins(lines, at) {
  const item = ITEM.exec(lines[at]);
  if (item && item[4] && (!item[3] || item[3] === "1")) return true;
  if (FENCE.test(lines[at]) || HEADING.test(lines[at]) || QUOTE.test(lines[at]) || rule(lines, at)) return true;
  return Boolean(table(lines, at, false));
}

/** Elements of a block by its kind. open: its end is still being written. */
const BUILD = {
  paragraph: ({ text }, _, open) => h("p", { dir: "auto" }, inline(text, open)),
  heading: ({ level, text }, _, open) => h(`h${Math.min(6, level + 2)}`, { dir: "auto" }, inline(text, open)),
  rule: () => h("hr"),
  fence: ({ code, language }) =>
    h("div", { class: "fence" },
      h("p", { class: "language" }, h("span", {}, language), copyButton((button) => button.closest(".fence").querySelector("code").textContent)),
      h("pre", { tabindex: 0, "aria-label": "Code" }, h("code", {}, code)),
    ),
  quote: ({ inner }, depth, open) => h("blockquote", {}, built(inner, depth + 1, open)),
  list: ({ ordered, start, items }, depth, open) =>
    h(ordered ? "ol" : "ul", { start: start === 1 ? null : start },
      items.map((lines, index) => h("li", { dir: "auto" }, item(lines, depth + 1, open && index === items.length - 1))),
    ),
  table: ({ rows, sides }, _, open) =>
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" },
      h("table", {}, h("thead", {}, row("th", rows[0], sides, open && rows.length === 1)),
        h("tbody", {}, rows.slice(1).map((cells, index) => row("td", cells, sides, open && index === rows.length - 2))))),
};

function built(lines, depth, open) {
  const made = blocks(lines, depth, open);
  return made.map((block, index) => BUILD[block.kind](block, depth, open && index === made.length - 1));
}

/** The first paragraph of an item stands beside its mark. */
function item(lines, depth, open) {
  const made = built(lines, depth, open);
  return made[0]?.tagName === "P" ? [...made[0].childNodes, ...made.slice(1)] : made;
}

/** As many cells as the head has. */
function row(tag, cells, sides, open) {
  const count = sides.length || cells.length;
  const shown = Array.from({ length: count }, (_, index) =>
    h(tag, { class: sides[index], dir: "auto" }, inline(cells[index] ?? "", open && index === cells.length - 1)),
  );
  return h("tr", {}, shown);
}
