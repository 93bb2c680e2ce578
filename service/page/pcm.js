// Sound as the API sends it.

/** A decoder of base64 of 16 bits, little endian -> Float32Array; an odd byte waits for the next call. */
export function pcmDecoder() {
  let rest = new Uint8Array(0);
  return (base64) => {
    const letters = atob(base64);
    const bytes = new Uint8Array(rest.length + letters.length);
    bytes.set(rest);
    for (let index = 0; index < letters.length; index++) bytes[rest.length + index] = letters.charCodeAt(index);
    const samples = new Float32Array(bytes.length >> 1);
    rest = bytes.slice(2 * samples.length);
    const view = new DataView(bytes.buffer);
    for (let index = 0; index < samples.length; index++) samples[index] = view.getInt16(2 * index, true) / 32768;
    return samples;
  };
}
