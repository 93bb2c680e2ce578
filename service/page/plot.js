// Small line plots over the last minutes, in SVG.

import { h, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 72;
const TOP = 15; // above it stands what it means
const LEAST = 60; // s that the width shows at first

export class Plot {
  /** series: labels of up to three lines. format(value): the value in words; unit: what its words count. span: seconds shown. */
  constructor({ title, series, format, unit = 1, span }) {
    this.format = format;
    this.unit = unit;
    this.span = span;
    this.series = series;
    this.points = series.map(() => []);
    this.values = series.map(() => h("b", {}, "–"));
    this.top = h("span", { class: "top" });
    this.lines = series.map((_, index) => svg("path", { class: `line line${index}` }));
    this.drawing = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("path", { class: "grid", d: `M0 ${HEIGHT - 0.5}H${WIDTH}M0 ${TOP}H${WIDTH}` }),
      ...this.lines,
    );
    const legend = series.map((label, index) =>
      h("span", { class: `key key${index}` }, label ? `${label} ` : "", this.values[index]),
    );
    this.element = h("figure", { class: "plot" },
      h("figcaption", {}, h("h3", {}, title), h("p", { class: "legend" }, ...legend)),
      h("div", { class: "frame" }, this.top, this.drawing),
    );
  }

  /** Adds a value per line, null where there is none, at `time` (s). */
  add(time, values) {
    values.forEach((value, index) => {
      const points = this.points[index];
      points.push([time, value]);
      while (points[0][0] < time - this.span) points.shift();
      this.values[index].textContent = value === null ? "–" : this.format(value);
    });
    const highest = Math.max(...this.points.flat().map(([, value]) => value ?? 0));
    const top = this.unit * niceTop(highest / this.unit);
    this.top.textContent = highest ? this.format(top) : "";
    this.points.forEach((points, index) => this.lines[index].setAttribute("d", this.#path(points, time, top)));
  }

  #path(points, now, top) {
    let path = "";
    let drawing = false;
    const shown = Math.min(this.span, Math.max(LEAST, now - points[0][0]));
    for (const [time, value] of points) {
      if (value !== null) {
        const x = WIDTH * (1 - (now - time) / shown);
        const y = HEIGHT - 1.5 - (HEIGHT - 1.5 - TOP) * (value / top);
        path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      }
      drawing = value !== null;
    }
    return path;
  }
}

/** The next of 1, 2, 5, 10, ... above a value. */
function niceTop(value) {
  if (!value) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 1.0001);
}
