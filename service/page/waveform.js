// The waveform of speech while it comes, with what has been heard in another colour.

const SLICE = 0.01; // s: what one stored peak covers
const BAR = 2;
const GAP = 1; // CSS pixels

export class Waveform {
  constructor(canvas) {
    this.canvas = canvas;
    this.reset();
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  reset() {
    this.peaks = [];
    this.pending = { peak: 0, samples: 0 };
    this.seconds = 0;
    this.heard = 0;
    this.draw();
  }

  push(samples, rate) {
    const size = Math.round(SLICE * rate);
    for (const sample of samples) {
      const value = Math.abs(sample);
      if (value > this.pending.peak) this.pending.peak = value;
      if (++this.pending.samples === size) {
        this.peaks.push(this.pending.peak);
        this.pending = { peak: 0, samples: 0 };
      }
    }
    this.seconds += samples.length / rate;
    this.canvas.setAttribute("aria-label", `Waveform of ${this.seconds.toFixed(1)} seconds of speech`);
    this.draw();
  }

  /** seconds: heard so far. */
  progress(seconds) {
    this.heard = seconds;
    this.draw();
  }

  draw() {
    this.scheduled ??= requestAnimationFrame(() => {
      this.scheduled = null;
      this.#paint();
    });
  }

  #paint() {
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const bars = Math.max(1, Math.floor(width / (BAR + GAP)));
    const shown = this.#bars(bars);
    const played = this.seconds ? (this.heard / this.seconds) * Math.min(bars, shown.length) : 0;
    for (let index = 0; index < bars; index++) {
      const peak = shown[index] ?? 0;
      const tall = Math.max(1, Math.sqrt(peak) * (height - 8));
      pen.fillStyle = style.getPropertyValue(index >= shown.length ? "--line" : index < played ? "--accent" : "--wave");
      pen.fillRect(index * (BAR + GAP), (height - tall) / 2, BAR, tall);
    }
  }

  /** Peaks of at most `most` bars; a short sound fills only a part of the width. */
  #bars(most) {
    const { peaks } = this;
    const each = Math.max(2, peaks.length / most);
    const count = Math.min(most, Math.ceil(peaks.length / each));
    return Array.from({ length: count }, (_, index) => {
      const slice = peaks.slice(Math.floor(index * each), Math.max(Math.floor(index * each) + 1, Math.floor((index + 1) * each)));
      return Math.max(...slice);
    });
  }
}
