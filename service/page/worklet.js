// Runs beside the page's script: the sound of a device as 16-bit samples at 24 kHz, each the mean of the time it stands for.

const STEP = 24_000 / sampleRate; // sampleRate: of the AudioContext, in Hz
const PACKET = 480; // samples: 20 ms

class Pcm16 extends AudioWorkletProcessor {
  packet = new Int16Array(PACKET);
  count = 0;
  sum = 0;
  weight = 0; // share of the next sample that is in `sum`

  process([[samples = []]]) {
    for (const sample of samples) {
      let left = STEP;
      for (; this.weight + left >= 1; this.weight = 0) {
        this.#add(this.sum + sample * (1 - this.weight));
        left -= 1 - this.weight;
        this.sum = 0;
      }
      this.sum += sample * left;
      this.weight += left;
    }
    return true;
  }

  #add(sample) {
    this.packet[this.count++] = 32767 * Math.max(-1, Math.min(1, sample));
    if (this.count < PACKET) return;
    this.port.postMessage(this.packet);
    this.count = 0;
  }
}

registerProcessor("pcm16", Pcm16);
