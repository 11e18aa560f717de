// The search takes +, -, :, ~, ^ and * for operators ("without", "in this field"); in flags and messages they are text.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...more) {
  if (typeof message.data === "string") // a query
    message = { ...message, data: message.data.replace(/(^|[\s"])[-+]+|[:~^*]/g, "$1 ") };
  return post.call(this, message, ...more);
};
