// What selenium runs in the page: arguments are the kind of work, its texts, and a function for the result.
const [work, given, done] = arguments;
const folder = document.querySelector("script[src$='main.js']").src.replace("main.js", "");
const describe = (node) => node.nodeType === Node.TEXT_NODE ? node.data : [
  node.localName,
  Object.fromEntries([...node.attributes].map(({ name, value }) => [name, value])),
  ...[...node.childNodes].map(describe),
];
const works = {
  shown(Markdown, texts) {
    return texts.map((text) => {
      const element = document.createElement("div");
      new Markdown(element).show(text);
      return { text: element.textContent, nodes: [...element.childNodes].map(describe) };
    });
  },
  written(Markdown, texts) {
    return texts.map((text) => {
      const element = document.createElement("div");
      const markdown = new Markdown(element);
      const seen = [];
      let first = null;
      for (let end = 1; end <= text.length; end++) {
        markdown.show(text.slice(0, end), true);
        first ??= element.firstChild;
        seen.push(element.textContent);
      }
      markdown.show(text);
      const whole = document.createElement("div");
      new Markdown(whole).show(text);
      return { seen, same: element.isEqualNode(whole), kept: element.firstChild === first };
    });
  },
  made(Markdown, texts) {
    return texts.map(({ text, times, open }) => {
      const element = document.createElement("div");
      new Markdown(element).show(text.repeat(times), open);
      let deepest = 0;
      for (const node of element.querySelectorAll("*")) {
        let depth = 0;
        for (let up = node; up !== element; up = up.parentNode) depth += 1;
        deepest = Math.max(deepest, depth);
        if (deepest > 200) break;
      }
      return { characters: element.textContent.length, deepest };
    });
  },
};
import(folder + "markdown.js").then(
  ({ Markdown }) => done(works[work](Markdown, given)),
  (error) => done(String(error)),
);
