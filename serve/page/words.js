// What the server's names mean, for people.

export const SHADES = 8;
export const COLLAPSE_THRESHOLD = 0.5;

export const DOORS = {
  // a confidence that is high enough is a chance to be right, and no more
  converge: { icon: "◆", word: "Confident", means: "may still be wrong" },
  escalate: { icon: "↗", word: "Escalate", means: "not to be relied on; think on, or ask a larger model" },
  abort: { icon: "✕", word: "Aborted", means: "not to be relied on, and no budget or no larger model was left" },
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
  out_of_calibration: "it is unlike what its confidence was calibrated on",
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

/**
 * The confidence in an answer, and what it is.
 *
 * @param outcome The last chunk's object of the choice.
 * @param calibration What `GET /v1/sigma0` says that it was calibrated on; null for a score that was not.
 */
export function confidenceInWords(outcome, calibration) {
  const verdict = outcome.verdict;
  const digits = number(verdict.confidence, verdict.confidence > 0.99 ? 4 : 2);
  // only certainty is 1
  const value = digits === "1.0000" && verdict.confidence < 1 ? "over 0.9999" : digits;
  if (verdict.reason === "out_of_calibration") return `${value}, but out of calibration`;
  // a text of several models has none of the served model's
  if (verdict.confidence == null || outcome.costs) return value;
  if (!calibration) return `${value}, a score that was not calibrated`;
  return `${value}, calibrated on ${calibration.answers.toLocaleString("en")} answers`;
}

/** A door under an answer: what an open one does not mean is never left out. */
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
