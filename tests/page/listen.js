// Runs before the page's scripts: what the page gives to WebAudio, and the lengths that the newest answer had.
window.heard = { seconds: 0, peak: 0, starts: 0 };
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (...when) {
  const samples = this.buffer.getChannelData(0);
  heard.starts += 1;
  heard.seconds += this.buffer.duration;
  heard.peak = samples.reduce((peak, sample) => Math.max(peak, Math.abs(sample)), heard.peak);
  return start.apply(this, when);
};
window.grown = [];
new MutationObserver(() => {
  const length = [...document.querySelectorAll(".answer .words")].at(-1)?.textContent.length ?? 0;
  if (length && length !== grown.at(-1)) grown.push(length);
}).observe(document, { childList: true, characterData: true, subtree: true });
