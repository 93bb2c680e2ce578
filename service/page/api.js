// Requests to the server that this page came from: the key, errors in words, and event streams. The window gets the
// event "trouble" where the server cannot be reached, or says that it is not available.

import { askForKey, currentKey } from "./key.js";

export const LIMIT = 10_000; // ms that a server has to say how it is
export const UNREACHABLE = "The server cannot be reached. Is it still running?";

/** status 0: no answer at all. param: path of the request's field that is at fault; the message does not repeat it. */
export class ApiError extends Error {
  constructor(message, status = 0, param = "") {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/**
 * The response to a request; asks for a key where one is wanted. ApiError in plain words for anything but success.
 * limit: ms in which the answer has to begin, in place of a signal.
 */
export async function request(path, { method = "GET", json, form, signal, limit, accept = () => false } = {}) {
  const body = json === undefined ? form : JSON.stringify(json);
  for (;;) {
    const key = await currentKey();
    const headers = {};
    if (json !== undefined) headers["content-type"] = "application/json";
    if (key) headers.authorization = `Bearer ${utf8(key)}`;
    const end = limit ? AbortSignal.timeout(limit) : signal;
    let response;
    try {
      response = await fetch(path, { method, headers, body, signal: end, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      const late = error.name === "TimeoutError";
      if (!late && (await reachable())) throw new ApiError(cutOff(body));
      dispatchEvent(new Event("trouble"));
      throw new ApiError(late ? "The server does not answer." : UNREACHABLE);
    }
    if (response.ok || accept(response.status)) return response;
    if (response.status === 503) dispatchEvent(new Event("trouble"));
    if (response.status !== 401) throw await errorOf(response);
    await response.body?.cancel();
    if (!(await askForKey(key))) throw new ApiError("This server needs an API key.", 401);
  }
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

/** A header holds bytes, and the server reads those of a key as UTF-8. */
function utf8(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/** What ended before it was whole. The server may be gone. */
export function brokenOff(what) {
  dispatchEvent(new Event("trouble"));
  return new ApiError(`The connection broke off before the ${what} was complete.`);
}

/** Whether the server answers at all. */
async function reachable() {
  try {
    await fetch("health", { signal: AbortSignal.timeout(LIMIT), cache: "no-store", credentials: "omit" });
    return true;
  } catch {
    return false;
  }
}

/** What /ready says of the server, in words. */
export function stateOf({ status, engine, detail, draining }) {
  if (draining) return "shutting down";
  return status === "ready" || !detail ? engine : `${engine}: ${detail}`;
}

/** A server that refuses a large body may close the connection before the browser reads why. */
function cutOff(body) {
  if (!body) return "The server closed the connection without an answer.";
  const size = typeof body === "string" ? body.length : [...body.values()].reduce((sum, value) => sum + (value.size ?? 0), 0);
  return `The server closed the connection while it was sent ${Math.ceil(size / 2 ** 20)} MiB, which may be more than it takes at once.`;
}

async function errorOf(response) {
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // Not ours: a proxy's page, or nothing.
  }
  const param = said.param ?? "";
  const unnamed = param && said.message?.startsWith(`${param}: `) ? said.message.slice(param.length + 2) : said.message;
  let message = unnamed ?? `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  const wait = response.headers.get("retry-after");
  if (wait) message += ` Try again in ${wait} s.`;
  return new ApiError(message, response.status, param);
}

/**
 * The parsed data of a stream's server-sent events, up to "[DONE]" or the end. ApiError for an error among them.
 * what: the word for what they bring.
 */
export async function* events(response, what) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        const line = part.split("\n").find((text) => text.startsWith("data:"));
        if (!line) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, 500);
        yield event;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw brokenOff(what);
  } finally {
    reader.cancel().catch(() => {});
  }
}
