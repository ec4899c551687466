// Requests to the server whose page this is. Paths are relative, so that the page also works below
// a path of another server.

export class ApiError extends Error {
  // status: of HTTP; 0 where no whole answer came.
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The models that can be asked, as /v1/models describes them.
export async function models(key) {
  const response = await request("v1/models", key);
  const list = (await response.json().catch(() => null))?.data;
  if (!Array.isArray(list)) throw new ApiError(0, "/v1/models gave no list of models.");
  return list;
}

// The chunks of a streamed answer. It ends with its last one, or throws: an ApiError, or the
// AbortError of the signal.
export async function* chat(fields, key, signal) {
  const streamed = { stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", key, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...fields, ...streamed }),
    signal,
  });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(0, textOf(chunk.error));
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, `The answer broke off: ${error.message}.`);
  }
  throw new ApiError(0, "The answer broke off: the connection was closed before its end.");
}

// The data of the server-sent events in a stream of bytes.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      // A carriage return at the end may be the first half of a line's end.
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function request(path, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, `The server cannot be reached: ${error.message}.`);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  let message;
  try {
    message = textOf(JSON.parse(text).error);
  } catch {
    message = text.slice(0, 300) || response.statusText;
  }
  const seconds = response.headers.get("retry-after");
  const later = seconds ? ` Try again in ${seconds} s.` : "";
  return new ApiError(response.status, `Error ${response.status}: ${message}.${later}`);
}

function textOf(error) {
  const text = typeof error === "string" ? error : (error.message ?? JSON.stringify(error));
  return text.replace(/\.$/, "");
}
