// The openai package as it ships from npm, against a server at argv[2]. Prints one JSON object of what it saw.
import fs from "node:fs";
import OpenAI from "openai";

const [url, chatModel, speechModel, picture, audioFile] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "the-key", maxRetries: 0 });
const image = { type: "image_url", image_url: { url: `data:image/png;base64,${fs.readFileSync(picture, "base64")}` } };
const ask = (extra = {}) => ({
  model: chatModel,
  messages: [{ role: "user", content: [image, { type: "text", text: "What is this?" }] }],
  max_tokens: 12,
  temperature: 0,
  ...extra,
});
const caught = async (work) => {
  try {
    await work();
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
  return null;
};
const seen = {};

seen.models = (await client.models.list()).data.map((model) => model.id);
const whole = await client.chat.completions.create(ask());
seen.text = whole.choices[0].message.content;
seen.finish = whole.choices[0].finish_reason;
seen.usage = whole.usage;

const stream = await client.chat.completions.create(ask({ stream: true, stream_options: { include_usage: true } }));
seen.streamed = "";
for await (const chunk of stream) {
  seen.streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) seen.streamUsage = chunk.usage;
}

const runner = client.chat.completions.stream(ask({ logprobs: true, top_logprobs: 2 }));
const assembled = await runner.finalChatCompletion();
seen.assembled = assembled.choices[0].message.content;
seen.logprobs = assembled.choices[0].logprobs.content.length;

const input = [{ role: "user", content: [
  { type: "input_image", image_url: image.image_url.url, detail: "auto" },
  { type: "input_text", text: "What is this?" },
] }];
const respond = { model: chatModel, input, max_output_tokens: 12, temperature: 0 };
const response = await client.responses.create(respond);
seen.responses = [response.output_text];
seen.status = response.status;
const events = client.responses.stream(respond);
let written = "";
events.on("response.output_text.delta", (event) => (written += event.delta));
seen.responses.push((await events.finalResponse()).output[0].content[0].text, written);

const speech = { model: speechModel, voice: "alloy", input: "Hello from Node.", seed: 1, max_len: 8 };
const file = await client.audio.speech.create({ ...speech, response_format: "wav" });
fs.writeFileSync(audioFile, Buffer.from(await file.arrayBuffer()));
const live = await client.audio.speech.create({ ...speech, response_format: "pcm" });
seen.contentType = live.headers.get("content-type");
seen.pieces = 0;
seen.bytes = 0;
for await (const piece of live.body) {
  seen.pieces += 1;
  seen.bytes += piece.length;
}

seen.leaving = await (async () => {
  const endless = await client.chat.completions.create(ask({ stream: true, max_tokens: 1800, ignore_eos: true }));
  for await (const _ of endless) break; // breaking out aborts the request
  return true;
})();
seen.errors = {
  model: await caught(() => client.chat.completions.create(ask({ model: "nobody" }))),
  value: await caught(() => client.chat.completions.create(ask({ temperature: 9 }))),
  voice: await caught(() => client.audio.speech.create({ ...speech, voice: "nobody" })),
  key: await caught(() => new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 }).models.list()),
};
console.log(JSON.stringify(seen));
