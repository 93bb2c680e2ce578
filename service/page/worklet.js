// The sound of a device as 16-bit samples at 24 kHz, each the mean of the time that it stands for. sampleRate: the device's.

registerProcessor("pcm16", class extends AudioWorkletProcessor {
  packet = new Int16Array(480);
  count = 0;
  sum = 0;
  weight = 0; // share of the next sample that is in `sum`

  process([[samples = []]]) {
    for (const sample of samples) {
      for (let left = 24_000 / sampleRate; left; ) {
        const part = Math.min(left, 1 - this.weight);
        this.sum += part * sample;
        this.weight += part;
        left -= part;
        if (this.weight < 1) continue;
        this.packet[this.count++] = 32767 * Math.max(-1, Math.min(1, this.sum));
        this.sum = this.weight = 0;
        if (this.count < this.packet.length) continue;
        this.port.postMessage(this.packet);
        this.count = 0;
      }
    }
    return true;
  }
});
