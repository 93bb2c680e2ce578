// Keeps the events that the page sends.
window.told = [];
const send = WebSocket.prototype.send;
WebSocket.prototype.send = function (data) {
  told.push(JSON.parse(data));
  return send.call(this, data);
};
