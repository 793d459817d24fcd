// The figures beside the conversation, of the answer that is looked at.

import { element } from "./answer.js";
import * as words from "./words.js";

const byId = (id) => document.getElementById(id);
// until so many tokens the line grows to the right, then it is drawn closer
const LINE_STARTS_AT = 24;

export function show(answer) {
  showCompute(answer);
  showDepths(answer?.tokens ?? [], answer?.totalLoops ?? 0);
  showMargins(answer?.tokens ?? []);
  showCollapse(answer?.tokens ?? []);
  showHandUps(answer);
  showVerdict(answer?.outcome, answer?.about.confidence);
}

/** Rows for the depths there are, before anything was asked. */
export function showDepths(tokens, totalLoops) {
  const counts = new Map();
  for (const { depth } of tokens) counts.set(depth, (counts.get(depth) ?? 0) + 1);
  const depths = Array.from({ length: totalLoops }, (_, index) => index + 1);
  if (counts.has(0)) depths.unshift(0);
  const list = byId("depths");
  if (list.children.length !== depths.length) list.replaceChildren(...depths.map(depthRow));
  depths.forEach((depth, index) => {
    const row = list.children[index];
    const count = counts.get(depth) ?? 0;
    const chip = row.querySelector(".token");
    chip.className = `token ${words.shade(depth, totalLoops)}`;
    chip.textContent = depth || "–";
    row.querySelector("svg").setAttribute("class", `bar ${words.shade(depth, totalLoops)}`);
    fill(row, tokens.length ? count / tokens.length : 0);
    row.querySelector(".count").textContent = count;
    row.title = `${words.depthInWords(depth, totalLoops)}: ${count} ${count === 1 ? "token" : "tokens"}`;
  });
}

function depthRow() {
  const row = element("li");
  const bar = byId("compute").firstElementChild.cloneNode(true);
  row.append(element("span", "token"), bar, element("span", "count"));
  return row;
}

function fill(around, share) {
  around.querySelector(".fill").setAttribute("width", `${Math.max(0, Math.min(1, share)) * 100}%`);
}

function meter(element, value, most, text) {
  element.setAttribute("aria-valuemax", most || 1);
  element.setAttribute("aria-valuenow", value);
  element.setAttribute("aria-valuetext", text);
  fill(element, most ? value / most : 0);
}

function showCompute(answer) {
  const text = answer?.fullPasses ? answer.computeInWords() : "No passes yet.";
  meter(byId("compute"), answer?.passes ?? 0, answer?.fullPasses ?? 0, text);
  byId("compute-text").textContent = text;
  const outcome = answer?.outcome;
  const rows = outcome
    ? [
        ["Mean depth", words.number(outcome.mean_depth)],
        ["Depth saved", words.percent(outcome.depth_saved)],
        ["Passes saved", words.percent(outcome.passes_saved)],
        ["Rows saved", words.percent(outcome.rows_saved)],
      ]
    : [];
  byId("savings-panel").hidden = !outcome;
  describe(byId("savings"), rows);
}

function showMargins(tokens) {
  const margins = tokens.map((token, index) => [index, token.margin]).filter(([, margin]) => margin != null);
  const line = byId("margins");
  line.setAttribute("viewBox", `0 0 ${Math.max(LINE_STARTS_AT, tokens.length)} 1`);
  line.querySelector("polyline").setAttribute("points", margins.map(([x, y]) => `${x + 0.5},${1 - y}`).join(" "));
  let text = "No tokens yet.";
  if (margins.length) {
    const [at, least] = margins.reduce((low, point) => (point[1] < low[1] ? point : low));
    const mean = margins.reduce((sum, [, margin]) => sum + margin, 0) / margins.length;
    const now = margins[margins.length - 1][1];
    text = `Margin ${words.number(now)} now, ${words.number(mean)} on average, least ${words.number(least)} at token ${at + 1}.`;
  }
  line.setAttribute("aria-label", `Margin of each token. ${text}`);
  byId("margins-text").textContent = text;
}

function showCollapse(tokens) {
  const scores = tokens.map((token) => token.proximity).filter((value) => value != null);
  const now = scores.at(-1) ?? 0;
  const most = scores.reduce((high, value) => Math.max(high, value), 0);
  const mark = words.number(words.COLLAPSE_THRESHOLD);
  let text = `No tokens yet; the mark at ${mark} is where a text counts as running in circles.`;
  if (scores.length) {
    const reached = most >= words.COLLAPSE_THRESHOLD ? `reached ${mark}: runs in circles` : `under the mark at ${mark}`;
    text = `${words.number(now)} now, highest ${words.number(most)}; ${reached}.`;
  }
  meter(byId("collapse"), now, 1, text);
  byId("collapse").classList.toggle("over", now >= words.COLLAPSE_THRESHOLD);
  byId("collapse-text").textContent = text;
}

function showHandUps(answer) {
  const tokens = answer?.tokens ?? [];
  const handed = tokens.filter((token) => answer.wasHandedUp(token));
  byId("hand-ups-panel").hidden = !(handed.length || answer?.about.ladder);
  const rungs = [...new Set(handed.map((token) => token.rung))].join(", ");
  byId("hand-ups-text").textContent = handed.length
    ? `${handed.length} of ${tokens.length} tokens, marked ↑, by ${rungs}.`
    : "No token was handed up.";
}

function showVerdict(outcome, calibration) {
  const door = outcome?.door;
  const { icon, word, means } = words.DOORS[door] ?? { icon: "•", word: door ?? "", means: "" };
  const line = byId("verdict");
  line.hidden = !door;
  line.className = `door door-${door}`;
  line.querySelector(".door-icon").textContent = icon;
  line.querySelector(".door-word").textContent = means ? `${word}: ${means}` : word;
  // the door's name stands above already
  let text = words.doorInWords((outcome?.door_text ?? "").replace(`${door}: `, ""));
  if (!text) text = outcome ? "Verdicts are switched off on this server." : "Shown when the answer is over.";
  byId("verdict-text").textContent = text;
  describe(
    byId("verdict-details"),
    outcome?.verdict ? [["Confidence", words.confidenceInWords(outcome, calibration)]] : [],
  );
}

/** The token that was picked; null for none. */
export function showToken(answer, index) {
  const token = answer?.tokens[index];
  byId("token-panel").classList.toggle("open", Boolean(token));
  byId("token-none").hidden = Boolean(token);
  byId("token-text").hidden = !token;
  byId("token-text").textContent = token ? words.visible(token.text) : "";
  describe(
    byId("token-details"),
    token
      ? [
          ["Place", `${index + 1} of ${answer.tokens.length}`],
          ["Depth", token.depth ? `${token.depth} of ${answer.totalLoops}` : "no loops"],
          ["Stopped as", words.reasonInWords(token.reason)],
          ["Fate", words.fateInWords(token.fate)],
          ["Margin", words.number(token.margin, 3)],
          ["Entropy", token.entropy == null ? "not known" : `${words.number(token.entropy, 3)} nats`],
          ["Deepest loop", deepestInWords(token)],
          ["Proximity", words.number(token.proximity, 3)],
          ["Written by", token.rung ?? "not known"],
          ...(token.handed_up ? [["Handed up for", token.handed_up]] : []),
        ]
      : [],
  );
}

/** Whether the last loop that the token has run would have chosen it too, which is known once the answer is over. */
function deepestInWords(token) {
  if (token.deepest_agrees == null) return "not known";
  const surprise = `${words.number(token.deepest_surprise, 3)} nats of surprise`;
  return `${token.deepest_agrees ? "agrees" : "disagrees"}, ${surprise}`;
}

function describe(list, rows) {
  list.hidden = !rows.length;
  list.replaceChildren(
    ...rows.map(([name, value]) => {
      const row = element("div");
      row.append(element("dt", "", name), element("dd", "", String(value)));
      return row;
    }),
  );
}
