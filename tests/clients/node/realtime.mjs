// OpenAI's Realtime clients for Node and for browsers as they ship from npm, against a server at argv[2]. They insist on
// wss, so a proxy before it ends TLS, as an operator's would. The server at argv[7] hears the file at argv[8], of mu-law. Prints
// one JSON object of what they saw.
import fs from "node:fs";
import net from "node:net";
import tls from "node:tls";
import { once } from "node:events";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";
import { OpenAIRealtimeWebSocket } from "openai/realtime/websocket";
import { WebSocket } from "ws";

const [url, model, speechModel, picture, certificate, hearing, recording] = process.argv.slice(2);
const pem = fs.readFileSync(certificate);
const trusted = { ca: pem, servername: "a.example" };
const proxies = [];
const proxied = async (url) => {
  const { hostname, port } = new URL(url);
  const proxy = tls.createServer({ key: pem, cert: pem }, (outer) => {
    const inner = net.connect(Number(port), hostname);
    for (const [from, to] of [[outer, inner], [inner, outer]]) from.pipe(to).on("error", () => from.destroy());
  });
  proxies.push(proxy);
  await once(proxy.listen(0, "127.0.0.1"), "listening");
  return `https://127.0.0.1:${proxy.address().port}/v1`;
};
const baseURL = await proxied(url);
const client = new OpenAI({ baseURL, apiKey: "the-key" });

/** Events as they come, in order; `next(type)` passes over those before one of that type, and fails at an error. */
class Heard {
  constructor(realtime) {
    this.types = [];
    this.waiting = [];
    this.wake = () => {};
    realtime.on("event", (event) => {
      this.types.push(event.type);
      this.waiting.push(event);
      this.wake();
    });
    realtime.on("error", (error) => (this.error = error));
  }
  async any() {
    while (!this.waiting.length) await new Promise((wake) => (this.wake = wake));
    return this.waiting.shift();
  }
  async next(type, take = () => {}) {
    for (;;) {
      const event = await this.any();
      if (event.type === "error" && type !== "error") throw new Error(JSON.stringify(event));
      take(event);
      if (event.type === type) return event;
    }
  }
}

const seen = {};
const realtime = new OpenAIRealtimeWS({ model, options: trusted }, client);
const heard = new Heard(realtime);
seen.session = (await heard.next("session.created")).session;
const audio = { output: { voice: "alloy", model: speechModel } };
realtime.send({ type: "session.update", session: { type: "realtime", instructions: "Be brief.", audio } });
seen.updated = (await heard.next("session.updated")).session;

const ask = (content) => {
  realtime.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
  return heard.next("conversation.item.done");
};
const image = `data:image/png;base64,${fs.readFileSync(picture, "base64")}`;
const asked = await ask([{ type: "input_image", image_url: image }, { type: "input_text", text: "What is this?" }]);
seen.asked = { role: asked.item.role, sent: asked.item.content[0].image_url === image };

seen.written = { deltas: "" };
realtime.send({ type: "response.create", response: { output_modalities: ["text"], max_output_tokens: 12 } });
seen.written.done = (
  await heard.next("response.done", (event) => {
    if (event.type === "response.output_text.delta") seen.written.deltas += event.delta;
    if (event.type === "response.output_text.done") seen.written.text = event.text;
  })
).response;

await ask([{ type: "input_text", text: "Say it." }]);
seen.spoken = { bytes: 0, deltas: "" };
realtime.send({ type: "response.create", response: { output_modalities: ["audio"], max_output_tokens: 12 } });
seen.spoken.done = (
  await heard.next("response.done", (event) => {
    if (event.type === "response.output_audio.delta") seen.spoken.bytes += Buffer.from(event.delta, "base64").length;
    if (event.type === "response.output_audio_transcript.delta") seen.spoken.deltas += event.delta;
    if (event.type === "response.output_audio_transcript.done") seen.spoken.transcript = event.transcript;
  })
).response;
const item_id = seen.spoken.done.output[0].id;
realtime.send({ type: "conversation.item.truncate", item_id, content_index: 0, audio_end_ms: 1 });
seen.truncated = (await heard.next("conversation.item.truncated")).audio_end_ms;

const name = "look_up";
const tools = [{ type: "function", name, parameters: { type: "object", properties: {}, additionalProperties: false } }];
seen.called = { deltas: "" };
const forced = { output_modalities: ["text"], tools, tool_choice: { type: "function", name } };
realtime.send({ type: "response.create", response: forced });
seen.called.done = (
  await heard.next("response.done", (event) => {
    if (event.type === "response.function_call_arguments.delta") seen.called.deltas += event.delta;
    if (event.type === "response.function_call_arguments.done") seen.called.arguments = event.arguments;
  })
).response;

realtime.send({ type: "conversation.item.delete", event_id: "mine", item_id: "nobody" });
await heard.next("error");
seen.refused = { message: heard.error.message, code: heard.error.error.code, event: heard.error.error.event_id };
const closed = once(realtime.socket, "close");
realtime.close();
seen.closed = (await closed)[0];
seen.types = heard.types;

// A browser's: its WebSocket sends no header, so that the key is a subprotocol.
globalThis.WebSocket = class extends WebSocket {
  constructor(address, protocols) {
    super(address, protocols, trusted);
  }
};
const browser = new OpenAIRealtimeWebSocket({ model, dangerouslyAllowBrowser: true }, client);
seen.browser = (await new Heard(browser).next("session.created")).session.model;
seen.protocol = browser.socket.protocol;
browser.close();

const stranger = new OpenAIRealtimeWS({ model, options: trusted }, new OpenAI({ baseURL, apiKey: "wrong" }));
seen.stranger = (await new Promise((resolve) => stranger.on("error", resolve))).message;

// A conversation with the microphone, with the defaults.
const listener = new OpenAI({ baseURL: await proxied(hearing), apiKey: "none" });
const talk = new OpenAIRealtimeWS({ model: "tiny", options: trusted }, listener);
const talked = new Heard(talk);
const input = { format: { type: "audio/pcmu" }, transcription: { model: "whisper-1" } };
await talked.next("session.created");
talk.send({ type: "session.update", session: { type: "realtime", audio: { input } } });
seen.detection = (await talked.next("session.updated")).session.audio.input.turn_detection.type;
const samples = fs.readFileSync(recording);
for (let at = 0; at < samples.length; at += 160) {
  talk.send({ type: "input_audio_buffer.append", audio: samples.subarray(at, at + 160).toString("base64") });
}
seen.started = (await talked.next("input_audio_buffer.speech_started")).audio_start_ms;
seen.stopped = (await talked.next("input_audio_buffer.speech_stopped")).audio_end_ms;
seen.heard = (await talked.next("conversation.item.input_audio_transcription.completed")).transcript;
seen.replied = (await talked.next("response.output_audio_transcript.done")).transcript;
await talked.next("response.done");
talk.close();
for (const proxy of proxies) proxy.close();
console.log(JSON.stringify(seen));
