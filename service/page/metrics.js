// Prometheus' text format, and what two readings of it say together.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** One reading. Names are given without the prefix "reprise_". */
export class Reading {
  constructor(text, time = performance.now() / 1000) {
    this.time = time;
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const match = LINE.exec(line);
      if (!match) continue;
      const name = match[1].replace(/^reprise_/, "");
      const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map(([, key, value]) => [key, value]));
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push({ labels, value: Number(match[3]) });
    }
  }

  /** Samples of a metric whose labels have these values. */
  of(name, where = {}) {
    const all = this.samples.get(name) ?? [];
    return all.filter(({ labels }) => Object.entries(where).every(([key, value]) => labels[key] === value));
  }

  /** Their sum; null where there is none. */
  sum(name, where) {
    const found = this.of(name, where);
    return found.length ? found.reduce((total, { value }) => total + value, 0) : null;
  }
}

/** How much a counter grew from one reading to the next; a restart counts from 0. */
export function growth(now, before, name, where) {
  const value = now.sum(name, where) ?? 0;
  const old = before?.sum(name, where) ?? 0;
  return value >= old ? value - old : value;
}

/** The same per second. */
export function rate(now, before, name, where) {
  return before ? growth(now, before, name, where) / (now.time - before.time) : null;
}

/** The quantile of what a histogram observed between two readings, interpolated as Prometheus does; null for nothing. */
export function quantile(now, before, name, share, where = {}) {
  const bounds = [...new Set(now.of(`${name}_bucket`, where).map(({ labels }) => labels.le))];
  const buckets = bounds
    .map((le) => [le === "+Inf" ? Infinity : Number(le), growth(now, before, `${name}_bucket`, { ...where, le })])
    .sort(([a], [b]) => a - b);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!total) return null;
  const rank = share * total;
  let [lower, below] = [0, 0];
  for (const [upper, count] of buckets) {
    if (count >= rank) {
      if (upper === Infinity) return lower;
      return count === below ? upper : lower + ((upper - lower) * (rank - below)) / (count - below);
    }
    [lower, below] = [upper, count];
  }
  return lower;
}
