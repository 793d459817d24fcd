// The chat: what is asked, what comes back, and what goes wrong.

import { Answer, element } from "./answer.js";
import * as figures from "./figures.js";
import { Settings } from "./settings.js";
import { Api, Failure } from "./stream.js";
import { doorInShort, exitInWords } from "./words.js";

const EXAMPLES = 3;
const byId = (id) => document.getElementById(id);
const api = new Api();
const settings = new Settings();
let about = {};
let messages = [];
let writing = null;
let picked = null;

async function describe() {
  try {
    about = await api.describe();
  } catch (error) {
    fail(error);
    byId("model-line").textContent = "The model is not known yet";
    return false;
  }
  const loops = `${about.total_loops} ${about.total_loops === 1 ? "loop" : "loops"} at full depth`;
  const rungs = about.ladder ? ` · ladder ${about.ladder.join(" → ")}` : "";
  byId("model-line").textContent = `${about.model} · ${loops} · ${exitInWords(about.exit)}${rungs}`;
  settings.know(about);
  showExamples();
  if (!messages.length) figures.showDepths([], about.total_loops);
  return true;
}

/** What the model knows, and prompts that it answers; a model that says neither shows neither. */
function showExamples() {
  byId("knows").hidden = !about.knows;
  byId("knows").textContent = about.knows ? `${about.model} knows ${about.knows}.` : "";
  const examples = about.examples?.slice(0, EXAMPLES) ?? [];
  byId("examples").hidden = !examples.length;
  byId("examples").replaceChildren(
    ...examples.map((prompt) => {
      // the question that a story ends with stands on a line of its own
      const [, story, question] = /^(.*[.!?])\s+([^.!?]+\?)$/su.exec(prompt) ?? [null, "", prompt];
      const button = element("button", "quiet example");
      button.type = "button";
      if (story) button.append(element("span", "story hint", story), " ");
      button.append(element("span", "last-question", question));
      button.addEventListener("click", () => {
        byId("question").value = prompt;
        send();
      });
      return button;
    }),
  );
}

async function send() {
  const question = byId("question").value.trim();
  if (!question || writing) return;
  complain("");
  if (about.total_loops == null && !(await describe())) return;
  byId("welcome").hidden = true;
  byId("question").value = "";
  const asked = element("article", "question", question);
  asked.setAttribute("aria-label", "You asked");
  const answer = new Answer(about, pick);
  byId("conversation").append(asked, answer.article);
  answer.article.scrollIntoView({ block: "end" });
  const turn = { asked, answer, question, control: new AbortController() };
  await write(turn);
}

async function write(turn) {
  const { answer, control } = turn;
  setWriting(turn);
  pick(answer, -1);
  let cut = "";
  try {
    const body = { model: about.model, messages: [...messages, { role: "user", content: turn.question }] };
    for await (const chunk of api.ask({ ...body, ...settings.request() }, control.signal)) {
      const follow = isInView(answer.article);
      answer.take(chunk);
      if (picked?.answer === answer) refresh();
      if (follow) answer.article.scrollIntoView({ block: "end" });
    }
    if (!answer.finishReason) throw new Failure("The answer broke off before its end.");
  } catch (error) {
    if (writing !== turn) return;
    cut = error.name === "AbortError" ? "stopped" : "broken off";
    if (error.name !== "AbortError") fail(error);
  }
  if (writing !== turn) return;
  const follow = isInView(answer.article);
  answer.close(cut);
  if (follow) answer.article.scrollIntoView({ block: "end" });
  if (answer.isEmpty && cut) takeBack(turn);
  else keep(turn, cut);
  setWriting(null);
}

function keep({ answer, question }, cut) {
  messages.push({ role: "user", content: question }, { role: "assistant", content: answer.text });
  const door = answer.outcome?.door;
  const end = cut ? `The answer was ${cut}.` : door ? `Verdict: ${doorInShort(door).text}.` : "";
  byId("finished-answers").append(element("p", "", `${answer.text} ${end}`));
}

/** A question that got no word of an answer goes back to where it was typed. */
function takeBack({ asked, answer, question }) {
  asked.remove();
  answer.article.remove();
  if (!byId("question").value) byId("question").value = question;
  byId("welcome").hidden = messages.length > 0;
  picked = null;
  figures.show(null);
  figures.showDepths([], about.total_loops ?? 0);
}

function setWriting(turn) {
  const focused = document.activeElement;
  writing = turn;
  byId("send").disabled = Boolean(turn);
  byId("stop").disabled = !turn;
  // a button that is switched off would take the focus with it
  if (turn && focused === byId("send")) byId("stop").focus();
  if (!turn && focused === byId("stop")) byId("question").focus();
}

function newChat() {
  const before = writing;
  setWriting(null);
  before?.control.abort();
  messages = [];
  picked = null;
  for (const article of byId("conversation").querySelectorAll("article")) article.remove();
  byId("finished-answers").replaceChildren();
  byId("welcome").hidden = false;
  complain("");
  figures.show(null);
  figures.showToken(null, -1);
  figures.showDepths([], about.total_loops ?? 0);
  byId("question").focus();
}

function pick(answer, index) {
  if (picked && picked.answer !== answer) picked.answer.markPicked(-1);
  picked = { answer, index };
  answer.markPicked(index);
  refresh();
}

function refresh() {
  figures.show(picked.answer);
  figures.showToken(picked.answer, picked.index);
}

function unpick() {
  if (!picked || picked.index < 0) return;
  const span = picked.answer.spans[picked.index];
  const held = byId("token-panel").contains(document.activeElement);
  pick(picked.answer, -1);
  if (held) {
    // the focus goes back without picking the token again
    span.focus();
    pick(picked.answer, -1);
  }
}

function fail(error) {
  const failure = error instanceof Failure ? error : new Failure(String(error.message ?? error), { status: 500 });
  complain(failure.inWords());
  if (failure.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

function complain(text) {
  byId("error").textContent = text;
}

/** Whether the end of an element can be seen: then the view follows as it grows. */
function isInView(element) {
  const slack = 80;
  return element.getBoundingClientRect().bottom <= byId("ask").getBoundingClientRect().top + slack;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function nameTheme() {
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("question").addEventListener("keydown", (event) => {
  // while a character is being composed, Enter picks it
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => writing?.control.abort());
byId("new-chat").addEventListener("click", newChat);
byId("close-token").addEventListener("click", unpick);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") unpick();
});
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  api.key = byId("key").value;
  complain("");
  if (await describe()) {
    byId("key-form").hidden = true;
    byId("question").focus();
  }
});
byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);

byId("settings").open = matchMedia("(min-width: 60rem)").matches;
nameTheme();
describe();
