// Shows errors of our nodes as a notice: what was found, what was expected, what to do, and a button that goes to the node.
// It goes with the graph that it is about, with the next Run, and on Escape.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

/** Whether an execution error is ours: one of our error types, or anything raised by one of our nodes. */
const ours = ({ exception_type: type = "", node_type: node = "" }) => type.startsWith("anygpu.") || node.startsWith("AnyGPU");

let dismissed = 0; // how often; an error that is still being put into words by then is out of date

function dismiss() {
  dismissed += 1;
  document.querySelector(".anygpu-toast")?.remove();
}

app.registerExtension({
  name: "anygpu.errors",
  beforeConfigureGraph: dismiss, // every graph that is opened, switched to or restored
  setup() {
    api.addEventListener("execution_error", async ({ detail }) => {
      if (!detail || !ours(detail)) return;
      dismiss();
      const before = dismissed;
      const { noticeOf } = await import("./errors.mjs");
      const element = await noticeOf(detail, dismiss);
      if (dismissed === before) document.body.append(element);
    });
    for (const kind of ["promptQueueing", "graphCleared"]) api.addEventListener(kind, dismiss);
    const escape = (event) => {
      if (event.key !== "Escape") return;
      if (event.target.closest?.(".anygpu-toast")) event.stopPropagation();
      dismiss();
    };
    window.addEventListener("keydown", escape, { capture: true });
  },
});
