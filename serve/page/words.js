// What the server's names mean, for people.

export const SHADES = 8;
export const COLLAPSE_THRESHOLD = 0.5;

export const DOORS = {
  // a rule that was met says that more loops would hardly change the text, not that it is right
  converge: { icon: "◆", word: "Settled", means: "says nothing of truth" },
  escalate: { icon: "↗", word: "Escalate", means: "not settled; think on, or ask a larger model" },
  abort: { icon: "✕", word: "Aborted", means: "not settled, and no budget was left; low confidence" },
  accepted: { icon: "•", word: "Accepted", means: "not settled, but the ladder's policy let it stand" },
  top_rung: { icon: "⤒", word: "Top rung", means: "not settled, and no larger model stands above" },
};

const REASONS = {
  threshold_met: "exit probability reached the threshold",
  fixed_point: "its state stood still",
  accel_fixed_point: "its state came to rest",
  confident: "its margin was large enough",
  fixed: "its depth was set beforehand",
  max_depth: "full depth, without its rule being met",
  collapse: "the text ran in circles",
  divergence: "its loop diverged",
  ungrounded: "it is not backed by the prompt",
  forced: "its grammar allowed no other",
};

const FATES = {
  contract: "contracting: steps grow shorter",
  spiral: "spiralling: steps keep turning",
  diverge: "diverging: steps grow longer",
};

const MODES = { qexit: ["q", "q"], margin: ["theta", "θ"], converge: ["eps", "ε"], accel: ["eps", "ε"] };

export function reasonInWords(reason) {
  return reason ? (REASONS[reason] ?? reason) : "not known";
}

/** What the server says of a door, with names of reasons put into words. */
export function doorInWords(text) {
  // only where a reason stands: "collapse" is also what a proximity is to
  text = text.replace(/(^|its reason is )([a-z_]+)/gu, (all, before, name) => before + (REASONS[name] ?? name));
  return text.replace(/^./u, (first) => first.toUpperCase());
}

export function fateInWords(fate) {
  return fate ? (FATES[fate] ?? fate) : "not known";
}

export function exitInWords(exit) {
  if (!exit) return "not known";
  if (exit.mode === "full") return "full depth";
  if (exit.mode === "fixed") return `depth ${exit.depth}`;
  const [field, symbol] = MODES[exit.mode] ?? [];
  return field && exit[field] != null ? `${exit.mode}, ${symbol} = ${number(exit[field])}` : exit.mode;
}

/** The class that gives a depth its colour; of a model without loops none. */
export function shade(depth, totalLoops) {
  if (!depth) return "no-depth";
  const share = totalLoops > 1 ? (Math.min(depth, totalLoops) - 1) / (totalLoops - 1) : 0;
  return `shade-${Math.round(share * (SHADES - 1))}`;
}

export function depthInWords(depth, totalLoops) {
  return depth ? `depth ${depth} of ${totalLoops}` : "no loops";
}

/** A door under an answer: what settling does not mean is never left out. */
export function doorInShort(door) {
  const { icon, word, means } = DOORS[door] ?? { icon: "•", word: door };
  return { icon, text: door === "converge" ? `${word}; ${means}` : word };
}

export function number(value, digits = 2) {
  return value == null ? "not known" : Number(value).toFixed(digits);
}

export function percent(share) {
  return share == null ? "not known" : `${Math.round(share * 100)} %`;
}

/** Invisible characters as visible signs, so that a token of white space can be seen. */
export function visible(text) {
  if (text === "") return "(no text)";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}
