// The line below an answer: what the API said about how it was made, and what this page measured.

const round = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits });

export function duration(seconds) {
  return seconds < 0.995 ? `${round(seconds * 1000, seconds < 0.00995 ? 1 : 0)} ms` : `${round(seconds, seconds < 10 ? 2 : 1)} s`;
}

const RATED = 0.1; // s: in less, the browser has not seen the tokens come one by one

export const count = (number, word) => `${round(number, 0)} ${word}${number === 1 ? "" : "s"}`;

/** Of ask()'s result. media: pictures and videos that were sent along. */
export function chatFacts({ usage, steps, finish, firstToken, seconds }, media) {
  const facts = [];
  if (firstToken !== null) facts.push(`first token ${duration(firstToken)}`);
  const made = usage.completion_tokens - (usage.completion_tokens_details?.audio_tokens ?? 0);
  if (firstToken !== null && made > 1 && seconds - firstToken >= RATED) {
    facts.push(`${round((made - 1) / (seconds - firstToken), 0)} tokens/s`);
  }
  facts.push(`${count(usage.prompt_tokens, "token")} in, ${round(made, 0)} out`);
  const { cached_tokens: cached } = usage.prompt_tokens_details;
  if (cached) facts.push(`${round(cached, 0)} from the prefix cache`);
  facts.push(...stepFacts(steps));
  if (steps && media) {
    const { encoded_media: encoded } = steps;
    facts.push(encoded ? `vision encoder: ${encoded} of ${media}` : "vision from the cache");
  }
  if (finish === "length") facts.push("cut at the length limit");
  return facts.join(" · ");
}

/** Of speak()'s result. */
export function speechFacts({ steps, firstAudio, seconds, audio }) {
  const facts = [];
  if (firstAudio !== null) facts.push(`first audio ${duration(firstAudio)}`);
  if (audio) facts.push(`${duration(audio)} of sound in ${duration(seconds)}`, `real-time factor ${round(seconds / audio, 2)}`);
  return [...facts, ...stepFacts(steps)].join(" · ");
}

/** Of a sound: when it began and how long it is, the time that making it took, how often it was too late (s), and the
 * steps of the speech model. */
export function aloudFacts({ first, audio, seconds, gaps, steps }) {
  if (!audio) return "";
  const facts = [`aloud: first audio ${duration(first)}`, `${duration(audio)} of sound`];
  facts.push(`real-time factor ${round(seconds / audio, 2)}`, gaps ? count(gaps, "gap") : "no gaps");
  return [...facts, ...stepFacts(steps)].join(" · ");
}

function stepFacts(steps) {
  if (!steps) return [];
  const { total, replayed, batch_size: batch } = steps;
  const eager = total - replayed;
  const how = !eager ? "all replayed" : !replayed ? "all eager" : `${replayed} replayed, ${eager} eager`;
  return [`${count(total, "step")}: ${how}`, `batch ${round(batch, 1)}`];
}
