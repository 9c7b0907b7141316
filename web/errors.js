// Shows errors of our nodes as a notice, in App mode also what a demo model drew otherwise, until Run or Escape.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

/** Whether an execution error is ours: one of our error types, or anything raised by one of our nodes. */
const ours = ({ exception_type: type = "", node_type: node = "" }) => type.startsWith("anygpu.") || node.startsWith("AnyGPU");

let dismissed = 0; // how often; an error that is still being put into words by then is out of date

function dismiss() {
  dismissed += 1;
  document.querySelector(".anygpu-toast")?.remove();
}

async function show(noticeIn) {
  const before = dismissed;
  const element = await noticeIn(await import("./errors.mjs"));
  if (!element || dismissed !== before) return;
  dismiss();
  document.body.append(element);
}

app.registerExtension({
  name: "anygpu.errors",
  beforeConfigureGraph: dismiss, // every graph that is opened, switched to or restored
  setup() {
    api.addEventListener("execution_error", ({ detail }) => {
      if (!detail || !ours(detail)) return;
      dismiss();
      void show(({ noticeOf }) => noticeOf(detail, dismiss));
    });
    api.addEventListener("execution_success", ({ detail }) => show(({ demoNotice }) => demoNotice(detail.prompt_id, dismiss)));
    for (const kind of ["promptQueueing", "graphCleared"]) api.addEventListener(kind, dismiss);
    const escape = (event) => {
      if (event.key !== "Escape") return;
      if (event.target.closest?.(".anygpu-toast")) event.stopPropagation();
      dismiss();
    };
    window.addEventListener("keydown", escape, { capture: true });
  },
});
