// What the last sampling did otherwise than the one before it, as the server compared their receipts.
import { make, table } from "./elements.mjs";

/** A sentence and a row per change; nothing before the second sampling. */
export function changeList(compared) {
  if (!compared) return null;
  const { before, headline, changes, missing } = compared;
  const rows = changes.map((change) => [change.subject, change.before, change.now]);
  return make(
    "section",
    { class: "anygpu-changes", "aria-label": "What changed" },
    make("h3", {}, "Since the sampling before"),
    make("p", { class: "anygpu-line" }, headline),
    table(["", "before", "now"], rows),
    make("p", { class: "anygpu-why" }, [`Compared with ${before}.`, missing.length > 0 && ` No receipt records ${missing.join(", ")}.`]),
  );
}
