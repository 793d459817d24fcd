// One answer: what the stream has sent of it so far, and its tokens in the conversation.

import { depthInWords, doorInShort, percent, reasonInWords, shade, visible } from "./words.js";

// lists of the last chunk, and the fields of a token that they set
const FINAL_FIELDS = {
  depths: "depth",
  reasons: "reason",
  fates: "fate",
  proximity: "proximity",
  margins: "margin",
  entropies: "entropy",
  rungs: "rung",
  deepest_surprises: "deepest_surprise",
  deepest_agrees: "deepest_agrees",
};

export class Answer {
  tokens = [];
  spans = [];
  passes = 0;
  fullPasses = 0;
  text = "";
  finishReason = null;
  /** The last chunk's object of the choice: savings, verdict, door. */
  outcome = null;
  usage = null;

  /**
   * @param about The server's description of its model (`GET /v1/sigma0`).
   * @param onPick Called with a token when it is picked.
   */
  constructor(about, onPick) {
    this.about = about;
    this.totalLoops = about.total_loops ?? 1;
    this.onPick = onPick;
    this.article = element("article", "answer writing");
    this.article.setAttribute("aria-label", "Answer");
    this.body = element("div", "tokens");
    this.body.setAttribute("role", "listbox");
    this.body.setAttribute("aria-orientation", "horizontal");
    this.body.setAttribute("aria-label", "Tokens of the answer");
    this.foot = element("p", "foot hint");
    this.article.append(this.body, this.foot);
    this.body.addEventListener("keydown", (event) => this.#move(event));
    this.body.addEventListener("focusin", (event) => this.#pick(event.target));
    this.body.addEventListener("click", (event) => this.#pick(event.target));
  }

  get isEmpty() {
    return !this.tokens.length && !this.text;
  }

  /** Whether another model than the lowest wrote the token. */
  wasHandedUp(token) {
    const lowest = [this.about.model, this.about.ladder?.[0]];
    return Boolean(token.handed_up) || (token.rung != null && this.about.model != null && !lowest.includes(token.rung));
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    this.totalLoops = chunk.sigma0?.total_loops ?? this.totalLoops;
    const choice = chunk.choices?.find(isFirst);
    const details = chunk.sigma0?.choices?.find(isFirst) ?? {};
    const tokens = details.tokens ?? [];
    const content = choice?.delta?.content ?? "";
    for (const token of tokens) this.#add(token);
    if (content && !tokens.length) this.body.append(content);
    this.text += content || tokens.map((token) => token.text).join("");
    // in the last chunk `passes` counts passes of the whole job instead, which other tokens may have shared
    if (details.full_passes != null && !choice?.finish_reason) {
      this.passes = details.passes;
      this.fullPasses = details.full_passes;
    } else {
      for (const token of tokens) {
        this.passes += token.depth;
        this.fullPasses += this.totalLoops;
      }
    }
    if (choice?.finish_reason) this.#finish(choice.finish_reason, details);
    this.#updateFoot();
  }

  /** No more will come: why, in a word, unless it came to its end. */
  close(why = "") {
    this.article.classList.remove("writing");
    this.cut = why;
    this.#updateFoot();
  }

  #add(token) {
    const span = element("span", "token");
    span.setAttribute("role", "option");
    span.tabIndex = this.spans.length ? -1 : 0;
    this.tokens.push(token);
    this.spans.push(span);
    this.#dress(span, token);
    // white space stands beside its token: inside, it would leave scraps of colour at the ends of lines
    const [, before, core, after] = /^(\s*)(.*?)(\s*)$/su.exec(token.text);
    span.textContent = core;
    this.body.append(...(core ? [before, span, after] : [span, before]));
  }

  #dress(span, token) {
    const depth = depthInWords(token.depth, this.totalLoops);
    const handedUp = this.wasHandedUp(token);
    const picked = span.classList.contains("picked");
    span.className = `token ${shade(token.depth, this.totalLoops)}`;
    span.classList.toggle("picked", picked);
    span.classList.toggle("handed-up", handedUp);
    if (!token.text.trim()) span.dataset.stands = token.text ? visible(token.text) : "∅";
    span.dataset.depth = token.depth || "–";
    span.title = `${depth}: ${reasonInWords(token.reason)}${handedUp ? `; handed up to ${token.rung}` : ""}`;
    span.setAttribute("aria-label", `${token.text.trim() || visible(token.text)}, ${depth}${handedUp ? ", handed up" : ""}`);
    span.setAttribute("aria-selected", String(picked));
  }

  #finish(finishReason, details) {
    this.finishReason = finishReason;
    this.outcome = details;
    this.tokens.forEach((token, index) => {
      for (const [list, field] of Object.entries(FINAL_FIELDS)) {
        if (details[list]?.length === this.tokens.length) token[field] = details[list][index];
      }
      this.#dress(this.spans[index], token);
    });
  }

  #updateFoot() {
    const parts = [];
    if (this.outcome?.door) {
      const { icon, text } = doorInShort(this.outcome.door);
      parts.push(`${icon} ${text}`);
    }
    if (this.fullPasses) parts.push(this.computeInWords());
    if (this.finishReason === "length") parts.push("cut at “Max tokens”");
    if (this.cut) parts.push(this.cut);
    if (this.usage) parts.push(`${this.usage.prompt_tokens} tokens read, ${this.usage.completion_tokens} written`);
    this.foot.textContent = parts.join(" · ");
  }

  computeInWords() {
    if (!this.fullPasses) return "No passes yet.";
    return `${this.passes} of ${this.fullPasses} passes, ${percent(1 - this.passes / this.fullPasses)} saved`;
  }

  #pick(target) {
    const index = this.spans.indexOf(target);
    if (index < 0) return;
    for (const span of this.spans) span.tabIndex = -1;
    target.tabIndex = 0;
    target.scrollIntoView({ block: "nearest" });
    this.onPick(this, index);
  }

  markPicked(index) {
    this.spans.forEach((span, position) => {
      span.classList.toggle("picked", position === index);
      span.setAttribute("aria-selected", String(position === index));
    });
  }

  #move(event) {
    const index = this.spans.indexOf(document.activeElement);
    if (index < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.spans.length - 1;
    const target = {
      ArrowLeft: index - 1,
      ArrowRight: index + 1,
      ArrowUp: this.#otherLine(index, -1),
      ArrowDown: this.#otherLine(index, 1),
      Home: 0,
      End: last,
      Enter: index,
      " ": index,
    }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    const span = this.spans[Math.max(0, Math.min(last, target))];
    span.focus();
    this.#pick(span);
  }

  /** The token above or below: on the next other line, the one that starts nearest. */
  #otherLine(index, step) {
    const from = this.spans[index];
    let best = index;
    let line = null;
    for (let other = index + step; other >= 0 && other < this.spans.length; other += step) {
      const span = this.spans[other];
      if (Math.abs(span.offsetTop - from.offsetTop) < from.offsetHeight / 2) continue;
      line ??= span.offsetTop;
      if (Math.abs(span.offsetTop - line) > from.offsetHeight / 2) break;
      const nearer = Math.abs(span.offsetLeft - from.offsetLeft) < Math.abs(this.spans[best].offsetLeft - from.offsetLeft);
      if (best === index || nearer) best = other;
    }
    return best;
  }
}

/** The page asks for one choice; an index that is left out is 0. */
function isFirst(choice) {
  return (choice.index ?? 0) === 0;
}

export function element(name, classes = "", text = "") {
  const made = document.createElement(name);
  made.className = classes;
  made.textContent = text;
  return made;
}
