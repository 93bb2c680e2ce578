// Markdown within a line: emphasis, code, links. Everything else, HTML too, is text.

import { h } from "./dom.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const MARKS = { "*1": "em", _1: "em", "*2": "strong", _2: "strong", "~2": "del" };
const MAX_OPEN = 24; // marks that are open at once: a bound on the work for each, and on how deep elements nest
const PLAIN = /[^\\`*_~[\]!<h]+|h+(?!ttp)/y;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const BARE = /https?:\/\/[^\s<>"'`*|\\^{}[\]]+/y;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const BREAK = /<br ?\/?>/iy;
// Bounds in patterns keep the time that hostile text takes linear.
const TARGET = /\(\s{0,9}(?:<([^<>\n]{0,2000})>|([^\s()<>]{0,2000}(?:\([^\s()]{0,200}\)[^\s()]{0,2000})?))(?:\s{1,9}(?:"[^"\n]{0,500}"|'[^'\n]{0,500}'))?\s{0,9}\)/y;
const TARGET_BEGUN = /\([^)\n]{0,500}$/y;
const WORD = /[\p{L}\p{N}]/u;

/** Nodes for `text`. open: its end is still being written, so that what it leaves open is taken as closed there. */
export function inline(text, open = false) {
  return new Inline(text, open).parse();
}

class Inline {
  constructor(text, open) {
    this.text = text;
    this.open = open;
    this.at = 0;
    this.frames = [{ mark: "", size: 0, nodes: [] }]; // the outermost first; each other one waits for its closing mark
    this.unclosed = new Set(); // lengths of backtick runs that nothing closes
  }

  get top() {
    return this.frames.at(-1);
  }

  parse() {
    while (this.at < this.text.length) this.#next();
    while (this.frames.length > 1) {
      const frame = this.top;
      if (this.open && frame.mark !== "[" && frame.nodes.length) this.#close(frame);
      else this.#flatten();
    }
    return this.top.nodes;
  }

  #next() {
    const plain = this.#match(PLAIN);
    if (plain) return this.#add(plain[0]);
    switch (this.text[this.at]) {
      case "\\":
        return this.#escape();
      case "`":
        return this.#code();
      case "[":
        return this.#openLink(1);
      case "!":
        return this.text[this.at + 1] === "[" ? this.#openLink(2) : this.#take(1);
      case "]":
        return this.#closeLink();
      case "<":
        return this.#match(BREAK) ? this.#add(h("br")) : this.#address(ANGLED, ([, address]) => address);
      case "h":
        return this.#address(BARE, ([address]) => trimmed(address));
      default:
        return this.#marks();
    }
  }

  #match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at = pattern.lastIndex;
    return found;
  }

  /** The next `length` characters as text. */
  #take(length) {
    this.#add(this.text.slice(this.at, this.at + length));
    this.at += length;
  }

  #add(node) {
    const { nodes } = this.top;
    if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes.push(nodes.pop() + node);
    else nodes.push(node);
  }

  #escape() {
    const found = this.#match(ESCAPED);
    if (found) this.#add(found[1]);
    else if (this.open && this.at === this.text.length - 1) this.at += 1;
    else this.#take(1);
  }

  #code() {
    const size = run(this.text, this.at);
    const from = this.at + size;
    const end = this.unclosed.has(size) ? -1 : closing(this.text, from, size);
    if (end < 0 && (!this.open || this.unclosed.has(size))) {
      this.unclosed.add(size);
      return this.#take(size);
    }
    let code = end < 0 ? this.text.slice(from, trimmedEnd(this.text, "`")) : this.text.slice(from, end);
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    if (code) this.#add(h("code", {}, code));
    this.at = end < 0 ? this.text.length : end + size;
  }

  #openLink(size) {
    if (this.frames.length > MAX_OPEN) return this.#take(size);
    this.frames.push({ mark: "[", size, nodes: [] });
    this.at += size;
  }

  #closeLink() {
    this.at += 1;
    const index = this.frames.findLastIndex(({ mark }) => mark === "[");
    const target = index > 0 ? this.#match(TARGET) : null;
    const address = target && allowed(target[1] ?? target[2]);
    if (address) {
      while (this.frames.length > index + 1) this.#flatten();
      const { nodes } = this.frames.pop();
      this.#add(link(address, nodes.length ? nodes.map(unlinked) : [address]));
    } else if (target) {
      this.#add(`]${target[0]}`);
    } else if (this.open && index > 0 && this.#match(TARGET_BEGUN)) {
      while (this.frames.length > index + 1) this.#flatten();
      const { nodes } = this.frames.pop();
      for (const node of nodes) this.#add(node); // the address is on its way
    } else {
      if (this.top.mark === "[") this.#flatten();
      this.#add("]");
    }
  }

  #address(pattern, addressOf) {
    const begin = this.at;
    const found = this.#match(pattern);
    const address = found && addressOf(found);
    if (!address || !allowed(address)) {
      this.at = begin;
      return this.#take(1);
    }
    this.at = begin + found[0].length - (found.at(-1).length - address.length);
    this.#add(link(allowed(address), [address]));
  }

  /** A run of *, _ or ~: closes what it can, then opens what it can. */
  #marks() {
    const mark = this.text[this.at];
    let size = run(this.text, this.at);
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + size] ?? "";
    this.at += size;
    if (this.open && !after) return; // more of it may follow
    const inWord = mark === "_" && WORD.test(before) && WORD.test(after);
    if (!inWord && /\S/.test(before)) {
      for (let index; size && (index = this.#opened(mark, size)) > 0; ) {
        while (this.frames.length > index + 1) this.#flatten();
        size -= this.top.size;
        this.#close(this.top);
      }
    }
    if (!inWord && /\S/.test(after)) {
      for (const part of sizes(mark, size)) {
        if (this.frames.length > MAX_OPEN) break;
        this.frames.push({ mark, size: part, nodes: [] });
        size -= part;
      }
    }
    if (size) this.#add(mark.repeat(size));
  }

  /** Index of the innermost open mark that a run of this size can close; -1 for none. */
  #opened(mark, size) {
    return this.frames.findLastIndex((frame) => frame.mark === mark && frame.size <= size && frame.nodes.length > 0);
  }

  #close(frame) {
    this.frames.pop();
    this.#add(h(MARKS[frame.mark + frame.size], {}, frame.nodes));
  }

  /** The innermost open mark was none: it and what followed are text. */
  #flatten() {
    const { mark, size, nodes } = this.frames.pop();
    this.#add(mark === "[" ? (size > 1 ? "![" : "[") : mark.repeat(size));
    for (const node of nodes) this.#add(node);
  }
}

/** The address as the browser understands it if it may be followed; else null. Relative ones may not. */
function allowed(address) {
  try {
    const url = new URL(address);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(href, nodes) {
  return h("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, nodes);
}

/** What stands inside a link is no link. */
function unlinked(node) {
  if (typeof node === "string") return node;
  if (node.tagName === "A") return node.textContent;
  for (const inner of node.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
  return node;
}

/** An address in a sentence ends before the sentence's own marks. */
function trimmed(address) {
  let end = address.length;
  while (end && ".,:;!?)~_".includes(address[end - 1])) {
    if (address[end - 1] === ")" && address.slice(0, end).includes("(")) break;
    end -= 1;
  }
  return address.slice(0, end);
}

/** The length of the text without the character at its end. */
function trimmedEnd(text, character) {
  let end = text.length;
  while (end && text[end - 1] === character) end -= 1;
  return end;
}

/** How often the character at `at` is repeated there. */
function run(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** Where the next run of exactly `size` backticks begins; -1 for nowhere. */
function closing(text, from, size) {
  for (let at = text.indexOf("`", from); at >= 0; ) {
    const found = run(text, at);
    if (found === size) return at;
    at = text.indexOf("`", at + found);
  }
  return -1;
}

/** The emphases that a run of marks opens: *** is * around **. */
function sizes(mark, size) {
  const odd = mark !== "~" && size % 2 ? [1] : [];
  return [...odd, ...Array.from({ length: Math.min(MAX_OPEN, size >> 1) }, () => 2)];
}
