// Plays samples while they arrive.

let context = null;

/** The tab's AudioContext. Call it from a click or key: browsers start no sound without one. */
export function wake() {
  context ??= new AudioContext();
  if (context.state === "suspended") context.resume();
  return context;
}

const LEAD = 0.06; // s before the first sample, and after a gap

export class Player {
  /** onProgress(seconds heard): while it plays; onEnd(): when all that was pushed before `finish` has been heard. */
  constructor({ onProgress = () => {}, onEnd = () => {} } = {}) {
    this.context = wake();
    this.onProgress = onProgress;
    this.onEnd = onEnd;
    this.sources = new Set();
    this.next = 0; // when the samples pushed so far end, on the context's clock
    this.pieces = []; // { at, from, seconds }: what plays when
    this.seconds = 0;
    this.gaps = 0; // how often the sound had ended before more of it came
    this.finished = false;
    this.stopped = false;
  }

  push(samples, rate) {
    if (this.stopped || !samples.length) return;
    const buffer = this.context.createBuffer(1, samples.length, rate);
    buffer.copyToChannel(samples, 0);
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.context.destination);
    if (this.next < this.context.currentTime) {
      if (this.pieces.length) this.gaps += 1;
      this.next = this.context.currentTime + LEAD;
    }
    source.start(this.next);
    this.pieces.push({ at: this.next, from: this.seconds, seconds: buffer.duration });
    this.next += buffer.duration;
    this.seconds += buffer.duration;
    this.sources.add(source);
    source.onended = () => this.#ended(source);
    if (this.sources.size === 1) this.#follow();
  }

  /** Nothing follows. */
  finish() {
    this.finished = true;
    if (!this.sources.size) this.#end();
  }

  stop() {
    this.stopped = true;
    for (const source of this.sources) {
      source.onended = null;
      source.stop();
    }
    this.sources.clear();
    this.#end();
  }

  /** Seconds that have been heard. */
  get heard() {
    const now = this.context.currentTime;
    const piece = this.pieces.findLast(({ at }) => at <= now);
    return piece ? piece.from + Math.min(piece.seconds, now - piece.at) : 0;
  }

  #follow() {
    if (!this.sources.size) return;
    this.onProgress(this.heard);
    requestAnimationFrame(() => this.#follow());
  }

  #ended(source) {
    this.sources.delete(source);
    if (this.finished && !this.sources.size) this.#end();
  }

  #end() {
    const end = this.onEnd;
    this.onEnd = () => {};
    if (!this.stopped) this.onProgress(this.seconds);
    end();
  }
}
