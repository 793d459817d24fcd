// The server's protocol: requests out, chunks in, and failures in words.

/** Server-sent events out of text that may be cut anywhere. */
export class EventParser {
  #rest = "";
  #data = [];

  /** The data of the events that `text` completes. */
  push(text) {
    this.#rest += text;
    const events = [];
    for (;;) {
      const end = /\r\n|\n|\r/.exec(this.#rest);
      // a lone \r at the end may be the first half of \r\n
      if (!end || (end[0] === "\r" && end.index === this.#rest.length - 1)) return events;
      this.#line(this.#rest.slice(0, end.index), events);
      this.#rest = this.#rest.slice(end.index + end[0].length);
    }
  }

  /** What was left when the stream ended: some servers leave out the last empty line. */
  end() {
    const events = [];
    this.#line(this.#rest.replace(/\r$/, ""), events);
    this.#line("", events);
    this.#rest = "";
    return events;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#data.length) events.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

/** A failure that the server reported, or that kept it from answering. */
export class Failure extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }

  /** What happened and what to do, in words. */
  inWords() {
    const said = this.message ? `${this.message.trim().replace(/[.!]?$/, ".")} ` : "";
    return said + this.#advice();
  }

  #advice() {
    if (this.status === 0) return "Check that the server runs and can be reached, then send again.";
    if (this.status === 401) return "Enter the server’s API key below, then send again.";
    if (this.status === 403) return "This key may not do that; ask whoever runs the server.";
    if (this.status === 404) return "Check that this page comes from the server that you mean to ask.";
    if (this.status === 413 || this.code === "context_length_exceeded") {
      return "Start a new chat, shorten the question or lower “Max tokens”.";
    }
    if (this.status === 429 || this.status === 503) return "The server is busy: wait a moment, then send again.";
    if (this.status >= 500) return "Send again; if it happens again, the server’s log tells why.";
    return "Change the settings or the question, then send again.";
  }
}

/** Calls under the page's own address, so that it also works behind a prefix. */
export class Api {
  // in memory only: a key in the browser's storage would outlive the visit
  #key = "";

  set key(value) {
    this.#key = value.trim();
  }

  async describe() {
    return (await this.#fetch("v1/sigma0", {})).json();
  }

  /** The chunks of an answer, parsed. */
  async *ask(body, signal) {
    const response = await this.#fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new EventParser();
    try {
      for (;;) {
        const { value, done } = await read(reader);
        for (const data of done ? parser.end() : parser.push(value)) {
          if (data.trim() === "[DONE]") return;
          yield parse(data);
        }
        if (done) return;
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  async #fetch(path, options) {
    const headers = { ...options.headers };
    if (this.#key) headers.Authorization = `Bearer ${this.#key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The server cannot be reached.");
    }
    if (!response.ok) throw await failure(response);
    return response;
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The connection broke off.");
  }
}

function parse(data) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new Failure("The server sent something that is no chunk of an answer.", { status: 500 });
  }
  if (chunk?.error) throw toFailure(chunk.error, 500);
  return chunk;
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return toFailure(body?.error ?? body?.detail, response.status);
}

function toFailure(error, status) {
  const message = typeof error === "string" ? error : error?.message;
  const known = Number.isInteger(error?.code) ? error.code : status;
  return new Failure(message || `The server answered with status ${known}.`, { status: known, code: error?.code });
}
