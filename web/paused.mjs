// The run ends after a step that is saved, and its prompt is queued again later, after a restart too.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { ask } from "./ask.mjs";
import { acting, kept } from "./elements.mjs";

export const pauseButton = () => acting("Pause after this step", async () => (await ask("/pause", {})).text);

/** Show a pause button while a run goes on. */
export function offer(pause, running) {
  pause.hidden = !running;
  if (!running) pause.lastChild.textContent = "";
}

/** Open a paused run's workflow where another is open, and queue its prompt; a step forgets it. */
async function resume({ id }) {
  const { prompt, workflow, outputs } = await ask(`/paused/${id}`);
  const kinds = (nodes) => JSON.stringify(Object.entries(nodes).map(([node, { class_type }]) => [node, class_type]).sort());
  const open = (await app.graphToPrompt()).output;
  if (workflow && kinds(open) !== kinds(prompt)) await app.loadGraphData(workflow, true, true, "Resumed");
  await api.queuePrompt(0, { output: prompt, workflow }, { partialExecutionTargets: outputs });
  return "Queued.";
}

function card(entry, changed) {
  const when = new Date(1000 * entry.time).toLocaleString();
  const forget = () => ask("/forget", { id: entry.id }).then(changed);
  const picture = entry.picture && { src: entry.picture, alt: "The step after which it was paused" };
  return kept(picture, `Paused after ${entry.where}`, when, acting("Resume", () => resume(entry)), acting("Forget", forget));
}

/** The cards of paused runs; `changed` is called when one was forgotten. */
export async function pausedCards(changed) {
  return (await ask("/paused")).paused.map((entry) => card(entry, changed));
}
