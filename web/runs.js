// Which workflow each run of this window is of. The text of a node of ours is kept from core while another workflow is
// open: core would show it under whatever node has that id there.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const MOST = 1000; // prompts that are remembered
const workflows = new Map(); // prompt id -> the workflow that was open when the prompt was queued
let queueing = null; // the workflow of a prompt whose id is not known yet, although it may run already
let last = null; // the newest event of a run; its text follows

const openWorkflow = () => app.extensionManager?.workflow?.activeWorkflow ?? null;

/** The workflow that a prompt was queued from; nothing where the page was loaded after that. */
export const workflowOf = (prompt) => workflows.get(prompt) ?? queueing;

/** Whether the open workflow may be the one that a prompt was queued from. */
export const isOpen = (prompt) => [undefined, null, openWorkflow()].includes(workflowOf(prompt));

app.registerExtension({
  name: "anygpu.runs",
  init() {
    const { queuePrompt } = api;
    api.queuePrompt = async function (...request) {
      const workflow = (queueing = openWorkflow());
      try {
        const answer = await queuePrompt.apply(this, request);
        if (answer?.prompt_id) workflows.set(answer.prompt_id, workflow);
        if (workflows.size > MOST) workflows.delete(workflows.keys().next().value);
        return answer;
      } finally {
        queueing = null;
      }
    };
    api.addEventListener("anygpu.run", ({ detail }) => (last = detail));
    const guard = (event) => {
      const ours = last && String(event.detail?.nodeId) === String(last.node);
      if (ours && !isOpen(last.prompt_id)) event.stopImmediatePropagation();
      last = null;
    };
    api.addEventListener("progress_text", guard, { capture: true }); // before core's own listener
  },
});
