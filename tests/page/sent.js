// Keeps what the page sends as JSON.
window.sent = [];
const fetched = window.fetch;
window.fetch = (path, options) => {
  if (typeof options?.body === "string") sent.push(JSON.parse(options.body));
  return fetched(path, options);
};
