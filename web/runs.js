// Which workflow each run is of. While another is open, core gets no texts or previews of our nodes.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const MOST = 1000; // prompts that are remembered
const SETTLED = 3000; // ms after which an opened graph is one of the same workflow, restored
const workflows = new Map(); // prompt id -> the workflow open when it was queued
let queueing = null; // the workflow of a prompt without an id yet, which may run already
let last = null; // the newest event of a run; its text follows
let told = { prompt: "", nodes: new Set() }; // the nodes of ours in the newest run
const texts = new WeakMap(); // workflow -> node id -> its last text, and what a demo drew otherwise
let before; // the workflow open when a graph began to open, which comes before its own
let settled = 0;

export const ENDS = ["execution_success", "execution_error", "execution_interrupted"];

const openWorkflow = () => app.extensionManager?.workflow?.activeWorkflow ?? null;

export const textsHere = () => texts.get(openWorkflow()) ?? [];

/** The workflow that a prompt was queued from; nothing where the page was loaded after that. */
export const workflowOf = (prompt) => workflows.get(prompt) ?? queueing;

/** Whether the open workflow may be the one that a prompt was queued from. */
export const isOpen = (prompt) => [undefined, null, openWorkflow()].includes(workflowOf(prompt));

export const inAppMode = () => (openWorkflow()?.activeMode ?? openWorkflow()?.initialMode) === "app";

app.registerExtension({
  name: "anygpu.runs",
  beforeConfigureGraph() {
    clearTimeout(settled);
    before = openWorkflow();
  },
  afterConfigureGraph() {
    clearTimeout(settled);
    settled = setTimeout(() => (before = undefined), SETTLED);
  },
  init() {
    const { dispatchCustomEvent, queuePrompt } = api;
    api.queuePrompt = async function (...request) {
      const workflow = (queueing = openWorkflow());
      before = undefined; // what is run has been opened
      try {
        const answer = await queuePrompt.apply(this, request);
        if (answer?.prompt_id) workflows.set(answer.prompt_id, workflow);
        if (workflows.size > MOST) workflows.delete(workflows.keys().next().value);
        return answer;
      } finally {
        queueing = null;
      }
    };
    api.addEventListener("anygpu.run", ({ detail }) => {
      last = detail;
      if (told.prompt !== detail.prompt_id) told = { prompt: detail.prompt_id, nodes: new Set() };
      told.nodes.add(String(detail.node));
    });
    api.addEventListener("graphCleared", () => app.canvas.subgraph || texts.delete(openWorkflow())); // ids restart
    const elsewhere = (prompt) => before === openWorkflow() || !isOpen(prompt);
    // The newest frontends take all texts away when a run ends, and ours say what was done in it.
    for (const end of ENDS) {
      api.addEventListener(end, ({ detail }) => setTimeout(() => {
        if (elsewhere(detail?.prompt_id)) return;
        for (const [nodeId, [text]] of textsHere()) dispatchCustomEvent.call(api, "progress_text", { nodeId, text });
      }, 200));
    }
    // Not a listener, which would be called after core's own.
    api.dispatchCustomEvent = function (kind, detail, ...rest) {
      const node = String(detail?.displayNodeId ?? detail?.nodeId);
      const text = kind === "progress_text" && last;
      if (text) last = null;
      if (text && node === String(text.node)) {
        if (elsewhere(text.prompt_id)) return true;
        const workflow = openWorkflow();
        if (workflow) texts.set(workflow, new Map(textsHere()).set(node, [detail.text, text.entry.demo]));
      }
      const picture = kind === "b_preview_with_metadata" && detail.jobId === told.prompt && told.nodes.has(node);
      if (picture && elsewhere(told.prompt)) return true;
      return dispatchCustomEvent.call(this, kind, detail, ...rest);
    };
  },
});
