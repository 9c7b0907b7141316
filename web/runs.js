// Which workflow each run of this window is of. The text of a node of ours is kept from core while another workflow is
// open: core would show it under whatever node has that id there.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const MOST = 1000; // prompts that are remembered
const SETTLED = 500; // milliseconds after which an opened graph's workflow is the open one
const workflows = new Map(); // prompt id -> the workflow that was open when the prompt was queued
let queueing = null; // the workflow of a prompt whose id is not known yet, although it may run already
let last = null; // the newest event of a run; its text follows
let loading = false; // a graph is being opened: it is on the canvas before its workflow is the open one
let settled = 0;

const openWorkflow = () => app.extensionManager?.workflow?.activeWorkflow ?? null;

/** The workflow that a prompt was queued from; nothing where the page was loaded after that. */
export const workflowOf = (prompt) => workflows.get(prompt) ?? queueing;

/** Whether the open workflow may be the one that a prompt was queued from. */
export const isOpen = (prompt) => [undefined, null, openWorkflow()].includes(workflowOf(prompt));

app.registerExtension({
  name: "anygpu.runs",
  beforeConfigureGraph() {
    clearTimeout(settled);
    loading = true;
  },
  afterConfigureGraph() {
    clearTimeout(settled);
    settled = setTimeout(() => (loading = false), SETTLED);
  },
  init() {
    const { dispatchCustomEvent, queuePrompt } = api;
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
    // Not a listener, which would be called after core's own.
    api.dispatchCustomEvent = function (kind, detail, ...rest) {
      if (kind === "progress_text") {
        const ours = last && String(detail?.nodeId) === String(last.node);
        const elsewhere = ours && (loading || !isOpen(last.prompt_id));
        last = null;
        if (elsewhere) return true;
      }
      return dispatchCustomEvent.call(this, kind, detail, ...rest);
    };
  },
});
